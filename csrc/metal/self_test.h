// Whether the device keeps fp16 subnormals, which Plans of form `subnormal`
// need (Gpu::half_subnormals).
#pragma once

#include <Metal/Metal.hpp>

namespace mlx_gguf::metal {

// Runs metal/half_test.h on every code and waits for it, on a queue of its own:
// no stream of MLX is touched. False also when the test cannot run, since the
// other forms are always right.
bool keeps_half_subnormals(
    MTL::Device* device, MTL::ComputePipelineState* half_test);

} // namespace mlx_gguf::metal
