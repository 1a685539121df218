# The Metal side of the extension. The names and plans of its kernels are data
# and are built everywhere; the rest where MLX has Metal.
target_sources(_ext PRIVATE csrc/metal/names.cpp csrc/metal/plan.cpp)

if(MLX_BUILD_METAL)
  file(GLOB_RECURSE METAL_KERNELS CONFIGURE_DEPENDS metal/*.h metal/*.metal)
  set(METAL_SOURCE ${CMAKE_CURRENT_BINARY_DIR}/metal_source.cpp)
  add_custom_command(
    OUTPUT ${METAL_SOURCE}
    COMMAND ${CMAKE_COMMAND} -DROOT=${CMAKE_CURRENT_SOURCE_DIR}/metal/kernels.metal
            -DOUTPUT=${METAL_SOURCE} -P ${CMAKE_CURRENT_SOURCE_DIR}/csrc/metal/embed.cmake
    DEPENDS ${METAL_KERNELS} csrc/metal/embed.cmake
    VERBATIM)
  target_sources(
    _ext PRIVATE ${METAL_SOURCE} csrc/gpu/batch.cpp csrc/gpu/nodes.cpp csrc/metal/device.cpp
                 csrc/metal/eval.cpp csrc/metal/self_test.cpp)
  target_compile_definitions(_ext PRIVATE MLX_GGUF_METAL)
endif()

if(APPLE)
  # MLX's target names frameworks by the path they had where it was built, in an
  # Xcode that others do not have. Nothing is linked but libmlx: the frameworks
  # and libobjc it loads are found at load time, as Python's symbols are.
  set_target_properties(mlx PROPERTIES INTERFACE_LINK_LIBRARIES "")
  set_target_properties(
    _ext PROPERTIES LINK_OPTIONS "-undefined;dynamic_lookup;-Wl,-dead_strip;-Wl,-x;-Wl,-S")
endif()
