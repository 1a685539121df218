// How 64 codes meet 64 words of x on x86: as words, even ones before odd ones.
#pragma once

#include "cpu/fixed_words.h"

namespace mlx_gguf::cpu::MLX_GGUF_ISA {
namespace {

// Codes of whole scales are bytes without a sign, as multiply_bytes wants them.
constexpr bool unsigned_codes = true;

// Sums start at what a bias comes to: a lane has four codes in a row.
constexpr bool counts_bias = true;

// Codes, and codes times scales.
template <bool is_signed, typename Of>
Split factors(Bytes codes) {
  return split<is_signed>(codes);
}

template <bool is_signed, typename Of>
Split factors(Bytes codes, Bytes scales) {
  static_assert(!is_signed);
  return {
      multiply_bytes(codes, shuffle(scales, load64(Of::even.at))),
      multiply_bytes(codes, shuffle(scales, load64(Of::odd.at)))};
}

// Adds the products with 64 words of x to sums within the quarters.
inline Ints dot(Ints sum, const Split& a, const int16_t* x) {
  sum = dot(sum, a.even, load64(x));
  return dot(sum, a.odd, load64(x + 32));
}

// Adds the squares of words to some of the lanes.
inline Ints add_squares(Ints sum, Words a) {
  return dot(sum, a, a);
}

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA
