// MLX's dtypes of activations, as the kernels name them.
#pragma once

#include "cpu/kernels.h"
#include "mlx/dtype.h"

namespace mlx_gguf::cpu {

inline bool is_number(mlx::core::Dtype dtype) {
  return dtype == mlx::core::float32 || dtype == mlx::core::float16 ||
         dtype == mlx::core::bfloat16;
}

inline Number number_of(mlx::core::Dtype dtype) {
  return dtype == mlx::core::float16    ? Number::f16
         : dtype == mlx::core::bfloat16 ? Number::bf16
                                        : Number::f32;
}

inline mlx::core::Dtype dtype_of(Number n) {
  return n == Number::f16    ? mlx::core::float16
         : n == Number::bf16 ? mlx::core::bfloat16
                             : mlx::core::float32;
}

} // namespace mlx_gguf::cpu
