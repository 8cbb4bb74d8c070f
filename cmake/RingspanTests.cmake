# All tests of the core in one executable.

ringspan_find_package(GTest libgtest-dev)
include(GoogleTest)

file(GLOB_RECURSE test_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/ringspan/*_test.cc)
file(GLOB support_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/ringspan/support/*.cc)
list(FILTER test_sources EXCLUDE REGEX "/emulated_[a-z0-9_]+\\.cc$")
# Those under mpirun are an executable of their own.
list(FILTER test_sources EXCLUDE REGEX "/transport/mpi/[a-z0-9_]+\\.cc$")
file(GLOB mpi_test_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/ringspan/transport/mpi/*.cc)
file(GLOB emulated_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/ringspan/kernel/emulated_*.cc)

# What the command line tool judges by is tested as the core is.
list(APPEND test_sources ${PROJECT_SOURCE_DIR}/tests/cli/verify_test.cc)

if(RINGSPAN_SANITIZE STREQUAL "thread")
  # Tests that start no thread have nothing for this sanitizer to see.
  foreach(source ${test_sources})
    file(STRINGS ${source} starts_threads REGEX "ThreadPool|std::thread|run_ranks|run_ring" LIMIT_COUNT 1)
    if(NOT starts_threads)
      list(REMOVE_ITEM test_sources ${source})
    endif()
  endforeach()
endif()

set(support_scope INTERFACE)
if(support_sources)
  add_library(ringspan_test_support STATIC ${support_sources})
  ringspan_set_warnings(ringspan_test_support)
  set(support_scope PUBLIC)
else()
  add_library(ringspan_test_support INTERFACE)
endif()
target_include_directories(ringspan_test_support ${support_scope} ${PROJECT_SOURCE_DIR})
target_link_libraries(ringspan_test_support ${support_scope} ringspan::core GTest::gtest)

if(test_sources)
  add_executable(ringspan_tests ${test_sources} ${PROJECT_SOURCE_DIR}/cli/verify_run.cc
    ${PROJECT_SOURCE_DIR}/cli/verify_tensors.cc)
  ringspan_set_warnings(ringspan_tests)
  ringspan_precompile_headers(ringspan_tests <gtest/gtest.h>)
  ringspan_find_package(nlohmann_json nlohmann-json3-dev)
  target_link_libraries(ringspan_tests PRIVATE ringspan_test_support GTest::gtest_main nlohmann_json::nlohmann_json)

  # The AVX-512 text again, with each of its intrinsics emulated by AVX2, so that machines without AVX-512 test it too.
  if(emulated_sources AND RINGSPAN_IS_X86 AND NOT RINGSPAN_GENERIC_ONLY)
    add_library(ringspan_emulated OBJECT ${emulated_sources})
    ringspan_set_warnings(ringspan_emulated)
    target_compile_definitions(ringspan_emulated PRIVATE RINGSPAN_EMULATE_AVX512)
    target_compile_options(ringspan_emulated PRIVATE ${RINGSPAN_KERNEL_FLAGS} ${RINGSPAN_FLAGS_avx2} -O2)
    target_link_libraries(ringspan_emulated PRIVATE ringspan_test_support)
    target_sources(ringspan_tests PRIVATE $<TARGET_OBJECTS:ringspan_emulated>)
    target_compile_definitions(ringspan_tests PRIVATE RINGSPAN_EMULATE_AVX512)
  endif()

  # A test that hangs ends at the timeout. Sanitizers slow some tests down twentyfold, on cores that others use too, and
  # starting under one takes as long as most tests: there each process runs a share of them.
  if(RINGSPAN_SANITIZE)
    set(num_shares 16)
    foreach(share RANGE 1 ${num_shares})
      math(EXPR index "${share} - 1")
      add_test(NAME share_${share}_of_${num_shares} COMMAND ringspan_tests)
      set_tests_properties(share_${share}_of_${num_shares} PROPERTIES TIMEOUT 600
        ENVIRONMENT "GTEST_TOTAL_SHARDS=${num_shares};GTEST_SHARD_INDEX=${index}")
    endforeach()
  else()
    gtest_discover_tests(ringspan_tests PROPERTIES TIMEOUT 60 DISCOVERY_TIMEOUT 60)
  endif()
endif()

if(TARGET ringspan_transport_mpi AND mpi_test_sources)
  add_executable(ringspan_mpi_tests ${mpi_test_sources})
  ringspan_set_warnings(ringspan_mpi_tests)
  target_link_libraries(ringspan_mpi_tests PRIVATE ringspan_test_support ringspan::transport_mpi GTest::gtest)
  # More ranks than cores, and root in a container, are errors for Open MPI unless it is told.
  execute_process(COMMAND ${MPIEXEC_EXECUTABLE} --version OUTPUT_VARIABLE mpiexec_version ERROR_QUIET)
  set(mpiexec_flags "")
  if(mpiexec_version MATCHES "Open ?(MPI|RTE|PRTE)")
    set(mpiexec_flags --allow-run-as-root --oversubscribe)
  endif()
  # With two ranks the next and the previous one are the same, with one there is none.
  foreach(world 1 2 4)
    set(launch ${MPIEXEC_EXECUTABLE} ${mpiexec_flags} ${MPIEXEC_NUMPROC_FLAG} ${world} $<TARGET_FILE:ringspan_mpi_tests>)
    add_test(NAME mpi_ranks_${world} COMMAND ${launch} --gtest_filter=-MpiStart.*)
    set_tests_properties(mpi_ranks_${world} PROPERTIES TIMEOUT 120 PROCESSORS ${world})
  endforeach()
  add_test(NAME mpi_start COMMAND ${launch} --gtest_filter=MpiStart.*)
  set_tests_properties(mpi_start PROPERTIES TIMEOUT 60 PROCESSORS 4)
endif()

# What is installed serves a project outside of the checkout. Libraries with a sanitizer in them would not.
find_package(Python 3.10 COMPONENTS Interpreter QUIET)
if(Python_FOUND AND NOT RINGSPAN_SANITIZE)
  add_test(NAME installed_package
    COMMAND ${Python_EXECUTABLE} ${PROJECT_SOURCE_DIR}/tools/check_install.py ${PROJECT_BINARY_DIR})
  set_tests_properties(installed_package PROPERTIES TIMEOUT 300 PROCESSORS 2)
  if(TARGET ringspan_binding)
    add_test(NAME operators_without_python
      COMMAND ${Python_EXECUTABLE} ${PROJECT_SOURCE_DIR}/tools/check_install.py ${PROJECT_BINARY_DIR} --torch)
    set_tests_properties(operators_without_python PROPERTIES TIMEOUT 600)
  endif()
endif()
