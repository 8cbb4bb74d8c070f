# One static library per layer. A layer links to the layers that it may include and to no other; tools/check_layers.py
# holds the same table for #include lines.
#
#   base < shape < mask < shard < plan < ledger < sim
#          shape < view < softmax
#                  {mask, softmax, view} < kernel
#   base < transport < mpi (RingspanMpi.cmake)
#                  {plan, kernel, transport} < ring

find_package(Threads REQUIRED)
include(RingspanIsa)

set(RINGSPAN_LAYER_TARGETS "")

# ringspan_add_layer(NAME FOLDERS folder... LINKS layer...)
# A folder may be empty: the layer is then an interface that only passes its links on.
function(ringspan_add_layer name)
  cmake_parse_arguments(ARG "" "" "FOLDERS;LINKS" ${ARGN})
  set(sources "")
  foreach(folder ${ARG_FOLDERS})
    file(GLOB found CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/ringspan/${folder}/*.cc)
    list(APPEND sources ${found})
  endforeach()
  # Which of these are compiled, and how, is decided per instruction set.
  list(FILTER sources EXCLUDE REGEX "/isa_[a-z0-9_]+\\.cc$")

  set(target ringspan_${name})
  if(sources)
    add_library(${target} STATIC ${sources})
    set(scope PUBLIC)
    ringspan_set_warnings(${target})
  else()
    add_library(${target} INTERFACE)
    set(scope INTERFACE)
  endif()
  target_compile_features(${target} ${scope} cxx_std_20)
  target_include_directories(${target} ${scope}
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  list(TRANSFORM ARG_LINKS PREPEND ringspan_)
  target_link_libraries(${target} ${scope} ${ARG_LINKS})
  add_library(ringspan::${name} ALIAS ${target})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${name})
  set(RINGSPAN_LAYER_TARGETS ${RINGSPAN_LAYER_TARGETS} ${target} PARENT_SCOPE)
endfunction()

# For a target that may still be an interface: its own dependencies are private, or absent.
function(ringspan_layer_scope target public_scope_variable has_sources_variable)
  get_target_property(type ${target} TYPE)
  if(type STREQUAL "INTERFACE_LIBRARY")
    set(${public_scope_variable} INTERFACE PARENT_SCOPE)
    set(${has_sources_variable} FALSE PARENT_SCOPE)
  else()
    set(${public_scope_variable} PUBLIC PARENT_SCOPE)
    set(${has_sources_variable} TRUE PARENT_SCOPE)
  endif()
endfunction()

ringspan_add_layer(base FOLDERS base)
ringspan_add_layer(shape FOLDERS shape LINKS base)
ringspan_add_layer(mask FOLDERS mask LINKS shape)
ringspan_add_layer(shard FOLDERS shard LINKS mask)
ringspan_add_layer(plan FOLDERS plan plan/schedules plan/proof LINKS shard)
ringspan_add_layer(view FOLDERS view LINKS shape)
ringspan_add_layer(softmax FOLDERS softmax LINKS view)
ringspan_add_layer(kernel FOLDERS kernel LINKS mask softmax view)
ringspan_add_layer(transport_inproc FOLDERS transport transport/inproc LINKS base)
ringspan_add_layer(ring FOLDERS ring LINKS plan kernel transport_inproc)
ringspan_add_layer(ledger FOLDERS ledger LINKS plan)
ringspan_add_layer(sim FOLDERS sim LINKS ledger)

ringspan_layer_scope(ringspan_base scope has_sources)
target_link_libraries(ringspan_base ${scope} Threads::Threads)

ringspan_find_package(nlohmann_json nlohmann-json3-dev)
foreach(writer plan ledger sim)
  ringspan_layer_scope(ringspan_${writer} scope has_sources)
  if(has_sources)
    target_link_libraries(ringspan_${writer} PRIVATE $<BUILD_INTERFACE:nlohmann_json::nlohmann_json>)
  endif()
endforeach()

ringspan_layer_scope(ringspan_kernel scope has_sources)
if(has_sources)
  ringspan_add_isa_sources(ringspan_kernel)
endif()

add_library(ringspan_core INTERFACE)
add_library(ringspan::core ALIAS ringspan_core)
set_target_properties(ringspan_core PROPERTIES EXPORT_NAME core)
target_link_libraries(ringspan_core INTERFACE ${RINGSPAN_LAYER_TARGETS})
