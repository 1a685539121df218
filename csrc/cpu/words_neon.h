// Codes and x as words, for NEON without dot products of bytes.
#pragma once

#include "cpu/fixed_words.h"

namespace mlx_gguf::cpu::MLX_GGUF_ISA {
namespace {

template <bool is_signed>
struct Operand {
  Split words;
  explicit Operand(Bytes codes) : words(split<is_signed>(codes)) {}

  // Sums of the products of `runs` times 16 codes, from the i-th 16 on.
  template <int runs>
  int32x4_t products(int i, const int16_t* x) const {
    int32x4_t sum = vdupq_n_s32(0);
    auto add = [&](Quarter codes, int16x8_t by) {
      sum = vmlal_s16(sum, vget_low_s16(s16(codes)), vget_low_s16(by));
      sum = vmlal_high_s16(sum, s16(codes), by);
    };
    for (int r = i; r < i + runs; ++r) {
      add(words.even.at[r], vld1q_s16(x + 8 * r));
      add(words.odd.at[r], vld1q_s16(x + 8 * r + 32));
    }
    return sum;
  }
};

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA
