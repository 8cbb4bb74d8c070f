# The MPI transport, layer `transport_mpi`. No other layer links to it, and ringspan::core does not: a program that uses
# it names it beside ringspan::core.

if(NOT RINGSPAN_MPI MATCHES "^(ON|OFF|AUTO)$")
  message(FATAL_ERROR "RINGSPAN_MPI is \"${RINGSPAN_MPI}\"; it must be ON, OFF or AUTO")
endif()
if(RINGSPAN_MPI STREQUAL "OFF")
  return()
endif()

set(MPI_CXX_SKIP_MPICXX TRUE)  # the C++ bindings that MPI-3 removed
find_package(MPI COMPONENTS CXX QUIET)
if(NOT MPI_CXX_FOUND)
  if(RINGSPAN_MPI STREQUAL "ON")
    message(FATAL_ERROR "RINGSPAN_MPI is ON and no MPI was found; on Debian and Ubuntu: apt-get install libopenmpi-dev "
      "openmpi-bin")
  endif()
  message(STATUS "No MPI was found: the MPI transport is not built")
  return()
endif()

ringspan_add_layer(transport_mpi FOLDERS transport/mpi LINKS base)
# Installed as an export of its own.
list(REMOVE_ITEM RINGSPAN_LAYER_TARGETS ringspan_transport_mpi)
ringspan_layer_scope(ringspan_transport_mpi scope has_sources)
target_link_libraries(ringspan_transport_mpi ${scope} MPI::MPI_CXX)
