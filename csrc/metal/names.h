// The grammar of Metal kernel names. A plan, a tensor type and the dtype of x
// make a name, the source line that instantiates it and the shape of a launch.
#pragma once

#include <string>

// plan.h alone would be metal/plan.h.
#include "../formats.h"
#include "../plan.h"

namespace mlx_gguf::metal {

// gguf_gemv_q4_k_subnormal_f16_r4_c1[_split]
// gguf_gemm_q4_k_f16_t_64x64, gguf_gather_gemm_q4_k_f16_n_32x32
// gguf_dequantize_q4_k_f16, gguf_half_test
// A matmul's kernel is the dequantize to f32 that precedes it. `simdgroups` is
// no part of a name: kernels take it from the launch.
std::string kernel_name(
    const Plan& plan, const Format& format, mlx::core::Dtype x);

// The explicit instantiation that exports kernel_name() from metal/'s source.
std::string instantiation(
    const Plan& plan, const Format& format, mlx::core::Dtype x);

// One threadgroup of `threads` covers `columns` of y's last axis (K for
// dequantize) by `rows` of the one before.
struct Geometry {
  int columns;
  int rows;
  int threads;
};
Geometry geometry(const Plan& plan);

} // namespace mlx_gguf::metal
