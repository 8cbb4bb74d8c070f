# Two components: `core` (library, headers, find_package) and `python` (what the wheel carries). The MPI transport, where
# it was built, goes with `core`, but into an export of its own: find_package(ringspan) alone asks for no MPI.

include(CMakePackageConfigHelpers)
set(config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/ringspan)

install(TARGETS ringspan_core ${RINGSPAN_LAYER_TARGETS} EXPORT ringspanTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT core)
set(without_mpi PATTERN transport/mpi EXCLUDE)
if(TARGET ringspan_transport_mpi)
  set(without_mpi "")
  install(TARGETS ringspan_transport_mpi EXPORT ringspanMpiTargets
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT core)
  install(EXPORT ringspanMpiTargets NAMESPACE ringspan:: DESTINATION ${config_dir} COMPONENT core)
endif()
install(DIRECTORY ringspan/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/ringspan COMPONENT core
  FILES_MATCHING PATTERN "*.h" PATTERN "*-inl.h" EXCLUDE ${without_mpi})
install(EXPORT ringspanTargets NAMESPACE ringspan:: DESTINATION ${config_dir} COMPONENT core)
configure_package_config_file(cmake/ringspanConfig.cmake.in ${PROJECT_BINARY_DIR}/ringspanConfig.cmake
  INSTALL_DESTINATION ${config_dir} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/ringspanConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/ringspanConfig.cmake ${PROJECT_BINARY_DIR}/ringspanConfigVersion.cmake
  DESTINATION ${config_dir} COMPONENT core)

if(TARGET ringspan_binding)
  install(TARGETS ringspan_binding LIBRARY DESTINATION ringspan COMPONENT python)
endif()
if(TARGET ringspan_cli)
  # scikit-build-core names the wheel's folder for executables.
  if(SKBUILD)
    install(TARGETS ringspan_cli RUNTIME DESTINATION ${SKBUILD_SCRIPTS_DIR} COMPONENT python)
  else()
    install(TARGETS ringspan_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT core)
  endif()
endif()
