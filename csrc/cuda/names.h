// The grammar of CUDA kernel names. A plan, a tensor type and the dtype of x
// make a name and the C++ function behind it.
#pragma once

#include <string>
#include <vector>

#include "cuda/plan.h"
#include "step.h"

namespace mlx_gguf::cuda {

// gguf_gemv_tma_q4_k_f16_copy1_every1_cluster2_rows8,
// gguf_gemv_q4_k_f32_tiles3, gguf_gemm_q4_k_f16, gguf_gemm_block_q4_k_f16_t,
// gguf_dequantize_q4_k_f16
std::string kernel_name(
    const Plan& plan, const Format& format, mlx::core::Dtype x);

// The function with its template arguments, as C++ names it.
std::string function_of(
    const Plan& plan, const Format& format, mlx::core::Dtype x);

// A number's type.
const char* type_name(mlx::core::Dtype x);

// The kernels of a step beside products; none where a model has no such layers.
struct StepFunctions {
  std::string norm, gate, attend, delta, route, combine;
};
// For caches with room for so many rows.
StepFunctions step_functions(const Sizes& sizes, mlx::core::Dtype x, int rows);

// All kernels that steps of a model may take beside products.
std::vector<std::string> all_functions(const Sizes& sizes, mlx::core::Dtype x);

// The kernel of delta.h for such q, k and v with so many numbers a head.
std::string delta_function(mlx::core::Dtype x, int width);

} // namespace mlx_gguf::cuda
