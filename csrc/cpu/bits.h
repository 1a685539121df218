// Bits of bytes moved within them.
#pragma once

#include "cpu/simd.h"

namespace mlx_gguf::cpu::MLX_GGUF_ISA {
namespace {

#ifdef __GFNI__

// What gf2p8affineqb multiplies a byte by, as a matrix of bits: the row of the
// lowest bit of the result is the last byte.
constexpr uint64_t bit_matrix(int from, int count, int to) {
  uint64_t rows = 0;
  for (int i = 0; i < count; ++i) {
    rows |= uint64_t{1} << (8 * (7 - to - i) + from + i);
  }
  return rows;
}

// Bits [from, from + count) of every byte moved to `to`; the others are those
// of `also`.
template <int from, int count, int to, int also = 0>
Bytes move_bits(Bytes a) {
  return _mm512_gf2p8affine_epi64_epi8(
      a, _mm512_set1_epi64(bit_matrix(from, count, to)), also);
}

// The same from `low` on in the first 32 bytes and from `high` in the others.
template <int low, int high, int count, int to>
Bytes move_bits_of_halves(Bytes a) {
  static constexpr Table<uint64_t, 8> matrices{
      [](int i) { return bit_matrix(i < 4 ? low : high, count, to); }};
  return _mm512_gf2p8affine_epi64_epi8(a, load64(matrices.at), 0);
}

// count bits from `from` on, above them those of `and_from`, and `also`.
template <int from, int count, int and_from, int and_count, int also = 0>
Bytes join_bits(Bytes a) {
  constexpr uint64_t matrix =
      bit_matrix(from, count, 0) | bit_matrix(and_from, and_count, count);
  return _mm512_gf2p8affine_epi64_epi8(a, _mm512_set1_epi64(matrix), also);
}

#else

template <int from, int count, int to, int also = 0>
Bytes move_bits(Bytes a) {
  Bytes bits = bit_and(shift_right<from>(a), bytes_of((1 << count) - 1));
  Bytes moved = shift_left<to>(bits);
  return also ? bit_or(moved, bytes_of(also)) : moved;
}

template <int low, int high, int count, int to>
Bytes move_bits_of_halves(Bytes a) {
  return move_bits<0, count, to>(shift_right_halves<low, high>(a));
}

template <int from, int count, int and_from, int and_count, int also = 0>
Bytes join_bits(Bytes a) {
  Bytes above = move_bits<and_from, and_count, count, also>(a);
  return bit_or(move_bits<from, count, 0>(a), above);
}

#endif

// (a & mask) | b
inline Bytes and_or(Bytes a, Bytes mask, Bytes b) {
#ifdef __AVX512F__
  return _mm512_ternarylogic_epi64(a, mask, b, 0xea);
#else
  return bit_or(bit_and(a, mask), b);
#endif
}

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA
