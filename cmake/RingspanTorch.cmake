# The PyTorch binding, module `_C` of the Python package. Torch's own CMake package insists on a CUDA toolkit wherever
# torch was built for CUDA; the binding needs only its headers and CPU libraries, so they are taken from the Python
# package directly.

file(GLOB binding_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/binding/*/*.cc)
if(NOT binding_sources)
  return()
endif()

find_package(Python 3.10 COMPONENTS Interpreter REQUIRED)
execute_process(
  COMMAND ${Python_EXECUTABLE} -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
  OUTPUT_VARIABLE torch_root OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
if(failed)
  message(FATAL_ERROR "RINGSPAN_TORCH needs a Python with torch installed; ${Python_EXECUTABLE} has none")
endif()

foreach(name c10 torch_cpu torch)
  find_library(RINGSPAN_LIB_${name} ${name} PATHS ${torch_root}/lib NO_DEFAULT_PATH REQUIRED)
  add_library(ringspan_torch::${name} SHARED IMPORTED)
  set_target_properties(ringspan_torch::${name} PROPERTIES IMPORTED_LOCATION ${RINGSPAN_LIB_${name}})
endforeach()

add_library(ringspan_binding MODULE ${binding_sources})
set_target_properties(ringspan_binding PROPERTIES
  OUTPUT_NAME _C PREFIX "" SUFFIX ".so"
  CXX_VISIBILITY_PRESET hidden
  INSTALL_RPATH "$ORIGIN:$ORIGIN/../torch/lib")
ringspan_set_warnings(ringspan_binding)
target_include_directories(ringspan_binding SYSTEM PRIVATE
  ${torch_root}/include ${torch_root}/include/torch/csrc/api/include)
target_compile_definitions(ringspan_binding PRIVATE USE_DISTRIBUTED USE_C10D_GLOO RINGSPAN_VERSION="${PROJECT_VERSION}")
# Without -fopenmp at::parallel_for runs serially and says nothing. It is a compile flag only: the OpenMP library at run
# time must be the one that torch brings, never a second.
target_compile_options(ringspan_binding PRIVATE -fopenmp)
# Each source spends two thirds of its time on these.
ringspan_precompile_headers(ringspan_binding <ATen/ATen.h> <torch/library.h>)
target_link_libraries(ringspan_binding PRIVATE ringspan::core
  ringspan_torch::torch ringspan_torch::torch_cpu ringspan_torch::c10)
# The core's symbols stay inside: two versions of it can then live in one process.
target_link_options(ringspan_binding PRIVATE -Wl,--exclude-libs,ALL)
