# What every target shares: language level, warnings, sanitizers, compiler cache.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
# The static core is linked into the binding's shared object.
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

get_property(multi_config GLOBAL PROPERTY GENERATOR_IS_MULTI_CONFIG)
if(NOT CMAKE_BUILD_TYPE AND NOT multi_config)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()

find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
endif()

if(RINGSPAN_SANITIZE STREQUAL "address")
  set(sanitizer_flags -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
elseif(RINGSPAN_SANITIZE STREQUAL "thread")
  set(sanitizer_flags -fsanitize=thread -fno-omit-frame-pointer)
elseif(RINGSPAN_SANITIZE)
  message(FATAL_ERROR "RINGSPAN_SANITIZE is \"${RINGSPAN_SANITIZE}\"; it must be empty, address or thread")
endif()
if(RINGSPAN_SANITIZE)
  add_compile_options(${sanitizer_flags})
  add_link_options(${sanitizer_flags})
endif()

# Flags of our own code only: headers of others come in as system headers.
function(ringspan_set_warnings target)
  # Locals only: a constructor's parameter may carry the name of the public member that it fills.
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wnon-virtual-dtor -Woverloaded-virtual -Werror=return-type
    $<$<CXX_COMPILER_ID:GNU>:-Wshadow=local>)
  if(RINGSPAN_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
endfunction()

# Headers of others that most sources of a target include, and that cost more than the sources. ccache sees through a
# precompiled header if the preprocessor names it, and CCACHE_SLOPPINESS has pch_defines and time_macros.
function(ringspan_precompile_headers target)
  target_precompile_headers(${target} PRIVATE ${ARGN})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND NOT CMAKE_DISABLE_PRECOMPILE_HEADERS)
    target_compile_options(${target} PRIVATE -fpch-preprocess)
  endif()
endfunction()

# A package that the system's package manager offers, or a message that names it.
macro(ringspan_find_package package debian_name)
  find_package(${package} QUIET)
  if(NOT ${package}_FOUND)
    message(FATAL_ERROR "${package} was not found; on Debian and Ubuntu: apt-get install ${debian_name}")
  endif()
endmacro()
