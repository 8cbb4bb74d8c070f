# What the bench needs besides the package: a small library that measures the machine itself, and the building of plans.

add_library(ringspan_peak MODULE ${PROJECT_SOURCE_DIR}/bench/peak.cc ${PROJECT_SOURCE_DIR}/bench/plan_time.cc)
set_target_properties(ringspan_peak PROPERTIES
  CXX_VISIBILITY_PRESET default
  LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bench)
ringspan_set_warnings(ringspan_peak)
target_link_libraries(ringspan_peak PRIVATE ringspan::core)
# -ffp-contract=fast: one fused instruction, as in the kernels. -Wno-psabi: no wide vector leaves a function.
target_compile_options(ringspan_peak PRIVATE -O3 -ffp-contract=fast -Wno-psabi)
