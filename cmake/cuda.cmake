# The CUDA side of the extension. Its names and plans are data and are built
# everywhere; the rest is a shared object of its own, which the extension loads
# where MLX has CUDA. It needs CUDA's headers, from the packages that MLX's CUDA
# wheels install or from CUDA_HEADERS, and no compiler but the host's.
set(CUDA_DATA csrc/cuda/choose.cpp csrc/cuda/names.cpp csrc/cuda/plan.cpp
    csrc/cuda/plan_tma.cpp)
target_sources(_ext PRIVATE csrc/cuda/load.cpp ${CUDA_DATA})
target_link_libraries(_ext PRIVATE ${CMAKE_DL_LIBS})

if(NOT DEFINED CUDA_HEADERS AND NOT APPLE)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c "import importlib.util as u, os
s = u.find_spec('nvidia')
for p in s.submodule_search_locations if s else []:
    h = os.path.join(p, 'cu13', 'include')
    if all(os.path.exists(os.path.join(h, f)) for f in ('cuda.h', 'cuda_runtime.h', 'nvrtc.h')):
        print(h, end='')
        break"
    OUTPUT_VARIABLE CUDA_HEADERS)
endif()
if(CUDA_HEADERS)
  file(GLOB_RECURSE CUDA_KERNELS CONFIGURE_DEPENDS cuda/*.h cuda/*.cu)
  set(CUDA_SOURCE ${CMAKE_CURRENT_BINARY_DIR}/cuda_source.cpp)
  add_custom_command(
    OUTPUT ${CUDA_SOURCE}
    COMMAND ${CMAKE_COMMAND} -DROOT=${CMAKE_CURRENT_SOURCE_DIR}/cuda/kernels.cu
            -DNAMESPACE=mlx_gguf::cuda -DOUTPUT=${CUDA_SOURCE}
            -P ${CMAKE_CURRENT_SOURCE_DIR}/csrc/metal/embed.cmake
    DEPENDS ${CUDA_KERNELS} csrc/metal/embed.cmake
    VERBATIM)
  add_library(
    _cuda MODULE
    ${CUDA_SOURCE} ${CUDA_DATA} csrc/cuda/ahead.cpp csrc/cuda/delta.cpp csrc/cuda/dense.cpp
    csrc/cuda/encode.cpp csrc/cuda/eval.cpp csrc/cuda/launch.cpp csrc/cuda/module.cpp csrc/cuda/step.cpp
    csrc/cuda/step_layers.cpp
    csrc/formats.cpp csrc/gpu/batch.cpp
    csrc/gpu/nodes.cpp)
  set_target_properties(_cuda PROPERTIES PREFIX "" SUFFIX ".so" CXX_VISIBILITY_PRESET hidden
                                         INSTALL_RPATH "$ORIGIN/../mlx/lib")
  target_include_directories(_cuda PRIVATE csrc)
  target_include_directories(_cuda SYSTEM PRIVATE csrc/cuda/stub ${CUDA_HEADERS})
  # What MLX's CUDA library and, through it, CUDA have: found when it is loaded.
  target_link_libraries(_cuda PRIVATE mlx)
  target_link_options(_cuda PRIVATE -Wl,--unresolved-symbols=ignore-all)
  install(TARGETS _cuda DESTINATION mlx_gguf)
else()
  message(STATUS "No CUDA headers: built without the CUDA backend")
endif()
