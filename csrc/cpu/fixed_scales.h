// Scales of a super-block, as products of many rows of x take them.
#pragma once

#include "cpu/fixed_gemv.h"

namespace mlx_gguf::cpu::MLX_GGUF_ISA {
namespace {

// Scales of a super-block as floats: one for every group, or the factor of
// whole ones. And mins, one for every group.
template <typename Type>
inline void group_floats(const uint8_t* b, float* scales, float* mins) {
  using T = Codes<Type>;
  if constexpr (T::has_whole) {
    constexpr int at = T::factors_at + 2 * T::d_place;
    store_eight(scales, eight_of_half(read<uint16_t>(b + at)));
  } else {
    store_eight(scales, T::scales(b));
  }
  if constexpr (T::has_mins && T::whole_scales) {
    Floats m = floats_of_bytes(T::mins(b));
    float factor = offset_factor<Type> * Factors<Type, 1>(&b).of_offsets(0);
    store_floats(mins, multiply(m, floats_of(factor)));
  } else if constexpr (T::has_mins) {
    store_eight(mins, T::mins(b));
  }
}

template <typename Type>
inline Bytes whole_scales(const uint8_t* b) {
  if constexpr (Codes<Type>::whole_scales) {
    return Codes<Type>::scales(b);
  } else {
    return Codes<Type>::whole(b);
  }
}

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA
