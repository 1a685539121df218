// How 64 codes meet 64 words of x with NEON: the sums of 16 codes, or of 32
// with the same scale, are multiplied by it.
#pragma once

#ifdef MLX_GGUF_DOTPROD
#include "cpu/planes_neon.h"
#else
#include "cpu/words_neon.h"
#endif

namespace mlx_gguf::cpu::MLX_GGUF_ISA {
namespace {

constexpr bool unsigned_codes = false;
constexpr bool counts_bias = false;

// Codes, and what their sums are to be multiplied by: int32, as many as a
// super-block has.
template <bool is_signed, typename Of>
Operand<is_signed> factors(Bytes codes) {
  return Operand<is_signed>(codes);
}

template <bool is_signed, typename Of>
struct Scaled {
  Operand<is_signed> codes;
  int32x4_t scales[Of::count / 4];
};

template <bool is_signed, typename Of>
Scaled<is_signed, Of> factors(Bytes codes, Bytes scales) {
  Scaled<is_signed, Of> out{Operand<is_signed>(codes), {}};
  int16x8_t words = vmovl_s8(vget_low_s8(s8(scales.at[0])));
  out.scales[0] = vmovl_s16(vget_low_s16(words));
  out.scales[1] = vmovl_high_s16(words);
  if constexpr (Of::count == 16) {
    words = vmovl_high_s8(s8(scales.at[0]));
    out.scales[2] = vmovl_s16(vget_low_s16(words));
    out.scales[3] = vmovl_high_s16(words);
  }
  return out;
}

// Adds the products with 64 words of x to sums within the quarters.
template <bool is_signed>
Ints dot(Ints sum, const Operand<is_signed>& a, const int16_t* x) {
  return each([&](int i) {
    return bytes(vaddq_s32(s32(sum.at[i]), a.template products<1>(i, x)));
  });
}

template <bool is_signed, typename Of>
Ints dot(Ints sum, const Scaled<is_signed, Of>& a, const int16_t* x) {
  auto add = [&]<int to, int scale>(int32x4_t products) {
    sum.at[to] = bytes(vmlaq_laneq_s32(
        s32(sum.at[to]), products, a.scales[scale / 4], scale % 4));
  };
  auto pair = [&]<int i>() {
    constexpr int first = Of::at(i), second = Of::at(i + 1);
    if constexpr (first == second) {
      // Every other 64 codes go to the second sum, so that a lane has sixteen
      // products of a super-block, as where scales differ.
      auto products = a.codes.template products<2>(i, x);
      add.template operator()<i + Of::part % 2, first>(products);
    } else {
      add.template operator()<i, first>(a.codes.template products<1>(i, x));
      add.template operator()<i + 1, second>(
          a.codes.template products<1>(i + 1, x));
    }
  };
  pair.template operator()<0>();
  pair.template operator()<2>();
  return sum;
}

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA
