// The Metal device: what it is and its compiled kernels. Needs metal-cpp, so
// only this folder's sources for Metal builds include it.
#pragma once

#include "../formats.h"
#include "../plan.h"
#include "mlx/backend/metal/device.h"

namespace mlx_gguf::metal {

mlx::core::metal::Device& device();

// The kernel of a plan, compiled on first use and kept for the process.
// Throws std::runtime_error with the compiler's message when it does not
// compile. Any thread.
MTL::ComputePipelineState* pipeline(
    const Plan& plan, const Format& format, mlx::core::Dtype x);

} // namespace mlx_gguf::metal
