// Super-blocks of 256 weights as bytes, for integer products: what the types
// have in common is in fixed_gemv.h, fixed_gemm.h and amx_gemm.h.
//
// A weight is scale * (code - bias) + min. A type gives, of the super-block at
// b,
//   codes<c>(b)        the c-th 64 of its codes, as bytes, in an order of its
//                      own: chunk(c, i) is which 16 consecutive weights lie in
//                      the i-th quarter
//   scales(b)          of every `group` weights: bytes, in all quarters, where
//                      whole_scales, else floats; `shared` times 64 codes in a
//                      row have them in common
//   whole(b)           the former, also of a type whose gemv takes the latter,
//                      where has_whole. A gemm of words sums products of `run`
//                      times 16 weights in whole numbers: those of one scale,
//                      or as many as seldom exceed 2^31
//   mins(b)            where has_mins, likewise but bytes that do not repeat
// and where byte_products, their products with scales, plus product_bias, are
// bytes too:
//   products(b)        a table or two of them for each quarter
//   scaled<c>(b, of)   the c-th 64, from those
// and where has_whole, factors_at: of two f16 numbers that lie there the one
// that scales are to be multiplied by, and the factor of mins, are d_place and
// 1 - d_place.
#pragma once

#include "cpu/bits.h"
#include "cpu/products.h"

namespace mlx_gguf::cpu::MLX_GGUF_ISA {
namespace {

struct CodesDefaults {
  static constexpr bool whole_scales = false;
  static constexpr bool has_whole = false;
  static constexpr bool signed_codes = false;
  static constexpr bool signed_scales = false;
  static constexpr bool has_mins = false;
  static constexpr bool far_scales =
      false; // beyond what f32 sums times them hold
  static constexpr int group = 32;
  static constexpr int bias = 0;
  static constexpr int shared = 1;
  static constexpr int run = 2;
  static constexpr bool byte_products = false;
  static constexpr int product_bias = 0;
};

template <typename Type>
struct Codes;

inline Bytes low_nibbles(Bytes q) {
  return bit_and(q, bytes_of(15));
}

inline Bytes high_nibbles(Bytes q) {
  return move_bits<4, 4, 0>(q);
}

// The same below bits that `top` has above them.
template <bool high>
Bytes nibbles_below(Bytes top, Bytes q) {
  return high ? bit_or(high_nibbles(q), top) : and_or(q, bytes_of(15), top);
}

// Codes that a nibble finds in a table, without signs where that is of use.
template <const int8_t (&table)[16], int largest>
struct TableCodes {
  static constexpr bool signed_codes = !unsigned_codes;
  static constexpr int bias = unsigned_codes ? largest : 0;
  static constexpr Table<uint8_t, 16> values{
      [](int i) { return table[i] + bias; }};
  static Bytes look_up(Bytes nibbles) {
    return shuffle(all_quarters(load16(values.at)), nibbles);
  }
};

using Iq4Codes = TableCodes<iq4_values, 127>;

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA
