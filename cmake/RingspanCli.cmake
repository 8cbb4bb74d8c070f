# The command line tool `ringspan`.

file(GLOB cli_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/cli/*.cc)
if(cli_sources)
  ringspan_find_package(CLI11 libcli11-dev)
  ringspan_find_package(nlohmann_json nlohmann-json3-dev)
  add_executable(ringspan_cli ${cli_sources})
  # What CLI11 adds to each source takes longer than the source.
  set_target_properties(ringspan_cli PROPERTIES OUTPUT_NAME ringspan UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 5)
  ringspan_set_warnings(ringspan_cli)
  target_compile_definitions(ringspan_cli PRIVATE RINGSPAN_VERSION="${PROJECT_VERSION}")
  target_link_libraries(ringspan_cli PRIVATE ringspan::core CLI11::CLI11 nlohmann_json::nlohmann_json)
endif()
