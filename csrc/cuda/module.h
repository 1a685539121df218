// Compiled kernels of the CUDA device: made with NVRTC on first use and kept on
// disk.
#pragma once

#include <cuda.h>

#include <string>
#include <utility>
#include <vector>

#include "cuda/plan.h"
#include "mlx/backend/cuda/device.h"

namespace mlx_gguf::cuda {

const Gpu& gpu();

// The kernel of a plan. Throws std::runtime_error with the compiler's or
// driver's message. Any thread; the device is current afterwards.
CUfunction function(const Plan& plan, const Format& format, mlx::core::Dtype x);

// The kernel of a C++ name, such as "gated<half_t>", likewise.
CUfunction function(const std::string& expression);

// The device, the driver's and the compiler's CUDA, and where kernels are kept.
std::vector<std::pair<std::string, std::string>> describe();

// Throws what the driver says of a result that is not success.
void check(CUresult result, const char* what);

} // namespace mlx_gguf::cuda
