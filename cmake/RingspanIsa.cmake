# The kernels' text is compiled once per instruction set, each in its own translation unit with its own flags; the
# choice among them is made at run time.

set(RINGSPAN_FLAGS_avx2 -mavx2 -mfma -mf16c)
set(RINGSPAN_FLAGS_avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl ${RINGSPAN_FLAGS_avx2})
set(RINGSPAN_FLAGS_avx512_bf16 ${RINGSPAN_FLAGS_avx512} -mavx512bf16)

set(RINGSPAN_IS_X86 FALSE)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$" AND CMAKE_SIZEOF_VOID_P EQUAL 8)
  set(RINGSPAN_IS_X86 TRUE)
endif()

# No errno, no traps: the kernels test neither. NaN and infinity keep their meaning.
# -Wno-psabi: vectors wider than the base ABI never cross a translation unit.
set(RINGSPAN_KERNEL_FLAGS -fno-math-errno -fno-trapping-math -ffp-contract=fast -Wno-psabi)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # GCC 12 warns of the "undefined" vectors inside its own AVX-512 header.
  list(APPEND RINGSPAN_KERNEL_FLAGS -Wno-uninitialized -Wno-maybe-uninitialized)
endif()
if(RINGSPAN_OPTIMIZE_KERNELS)
  list(APPEND RINGSPAN_KERNEL_FLAGS -O3)
endif()
if(RINGSPAN_SANITIZE STREQUAL "address" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # Inline checks of huge unrolled functions make both the compile and the run 20 times slower; calls do not.
  list(APPEND RINGSPAN_KERNEL_FLAGS --param=asan-instrumentation-with-call-threshold=0 --param=asan-stack=0)
endif()

# A build with a sanitizer runs where it is made. What this processor cannot run would only be compiled, for minutes.
set(RINGSPAN_BUILD_AVX512 TRUE)
if(RINGSPAN_SANITIZE AND EXISTS /proc/cpuinfo)
  file(STRINGS /proc/cpuinfo cpu_flags REGEX "^flags" LIMIT_COUNT 1)
  if(NOT cpu_flags MATCHES " avx512f( |$)")
    set(RINGSPAN_BUILD_AVX512 FALSE)
  endif()
endif()

function(ringspan_add_isa_sources target)
  set(isas generic)
  if(RINGSPAN_IS_X86 AND NOT RINGSPAN_GENERIC_ONLY)
    list(APPEND isas avx2)
    if(RINGSPAN_BUILD_AVX512)
      list(APPEND isas avx512 avx512_bf16)
    endif()
  endif()
  foreach(isa ${isas})
    # Through a glob, so that a file that appears later is noticed.
    file(GLOB source CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/ringspan/kernel/isa_${isa}.cc)
    if(source)
      target_sources(${target} PRIVATE ${source})
      set_property(SOURCE ${source} APPEND PROPERTY COMPILE_OPTIONS ${RINGSPAN_KERNEL_FLAGS} ${RINGSPAN_FLAGS_${isa}})
      if(isa MATCHES "^avx512")
        set(has_avx512 TRUE)
      elseif(NOT isa STREQUAL "generic")
        set(has_x86 TRUE)
      endif()
    endif()
  endforeach()
  if(has_x86)
    target_compile_definitions(${target} PRIVATE RINGSPAN_ISA_X86=1)
  endif()
  if(has_avx512)
    target_compile_definitions(${target} PRIVATE RINGSPAN_ISA_AVX512=1)
  endif()
endfunction()
