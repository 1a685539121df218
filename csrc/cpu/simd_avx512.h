// Vectors of 64 bytes with AVX-512: one register.
#pragma once

#include "cpu/simd_x86.h"

namespace mlx_gguf::cpu::MLX_GGUF_ISA {
namespace {

using Bytes = __m512i; // 64 of 8 bits
using Words = __m512i; // 32 of 16 bits
using Ints = __m512i;  // 16 of 32 bits
using Floats = __m512; // 16

inline Bytes load64(const void* p) {
  return _mm512_loadu_si512(p);
}

inline void store_words(int16_t* to, Words a) {
  _mm512_store_si512(to, a);
}

// Two words, again and again.
inline Words pair_in_all(const int16_t* p) {
  return _mm512_set1_epi32(two_words(p));
}

inline Bytes two_halves(Half a, Half b) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
}

inline Floats two_halves(HalfFloats a, HalfFloats b) {
  return _mm512_insertf32x8(_mm512_castps256_ps512(a), b, 1);
}

inline Bytes both_halves(Half a) {
  return _mm512_broadcast_i64x4(a);
}

inline Bytes all_quarters(Quarter a) {
  return _mm512_broadcast_i32x4(a);
}

inline Bytes all_eighths(uint64_t a) {
  return _mm512_set1_epi64(static_cast<int64_t>(a));
}

inline Bytes bytes_of(int value) {
  return _mm512_set1_epi8(static_cast<char>(value));
}

inline Words words_of(int value) {
  return _mm512_set1_epi16(static_cast<short>(value));
}

inline Quarter first_quarter(Bytes a) {
  return _mm512_castsi512_si128(a);
}

inline Bytes bit_and(Bytes a, Bytes b) {
  return _mm512_and_si512(a, b);
}

inline Bytes bit_or(Bytes a, Bytes b) {
  return _mm512_or_si512(a, b);
}

inline Bytes add_bytes(Bytes a, Bytes b) {
  return _mm512_add_epi8(a, b);
}

inline Words add_words(Words a, Words b) {
  return _mm512_add_epi16(a, b);
}

inline Words multiply_words(Words a, Words b) {
  return _mm512_mullo_epi16(a, b);
}

// Words shifted by a constant: right with zeros, right with the sign, left.
template <int n>
Words shift_right(Words a) {
  return n ? _mm512_srli_epi16(a, n) : a;
}

template <int n>
Words shift_right_signed(Words a) {
  return _mm512_srai_epi16(a, n);
}

template <int n>
Words shift_left(Words a) {
  return n ? _mm512_slli_epi16(a, n) : a;
}

// The first 32 bytes by one constant, the others by another.
template <int low, int high>
Words shift_right_halves(Words a) {
  static constexpr Table<int16_t, 32> by{
      [](int i) { return i < 16 ? low : high; }};
  return _mm512_srlv_epi16(a, _mm512_load_si512(by.at));
}

// table[index] within each 16 bytes; 0 where the index has its top bit set.
inline Bytes shuffle(Bytes table, Bytes index) {
  return _mm512_shuffle_epi8(table, index);
}

// Adds `value` to the bytes whose bit is set.
inline Bytes add_where(Bytes a, uint64_t bits, int value) {
  return _mm512_mask_add_epi8(a, bits, a, bytes_of(value));
}

// Sums of two neighbours: an unsigned byte by a signed one, two words (added to
// `sum`).
inline Words multiply_bytes(Bytes codes, Bytes scales) {
  return _mm512_maddubs_epi16(codes, scales);
}

inline Ints dot(Ints sum, Words a, Words b) {
#ifdef __AVX512VNNI__
  return _mm512_dpwssd_epi32(sum, a, b);
#else
  return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
}

#ifdef __AVX512VNNI__

// Adds sums of four neighbours: unsigned bytes by signed ones.
inline Ints dot_bytes(Ints sum, Bytes codes, const int8_t* x) {
  return _mm512_dpbusd_epi32(sum, codes, load64(x));
}

#endif

inline Ints no_ints() {
  return _mm512_setzero_si512();
}

inline Ints add_ints(Ints a, Ints b) {
  return _mm512_add_epi32(a, b);
}

template <int n>
Ints shift_ints_left(Ints a) {
  return _mm512_slli_epi32(a, n);
}

template <int n>
Ints shift_ints_right(Ints a) { // with the sign
  return _mm512_srai_epi32(a, n);
}

inline Floats to_floats(Ints a) {
  return _mm512_cvtepi32_ps(a);
}

inline Floats load_floats(const float* p) {
  return _mm512_loadu_ps(p);
}

inline void store_floats(float* p, Floats a) {
  _mm512_storeu_ps(p, a);
}

inline Floats floats_of(float value) {
  return _mm512_set1_ps(value);
}

// The first eight lanes, and the others.
inline Floats floats_of(float low, float high) {
  return _mm512_mask_broadcastss_ps(
      _mm512_set1_ps(low), 0xff00, _mm_set_ss(high));
}

inline Floats repeat_floats(const float* eight) {
  return _mm512_broadcast_f32x8(_mm256_loadu_ps(eight));
}

inline HalfFloats first_half(Floats a) {
  return _mm512_castps512_ps256(a);
}

inline HalfFloats second_half(Floats a) {
  return _mm512_extractf32x8_ps(a, 1);
}

inline Floats multiply(Floats a, Floats b) {
  return _mm512_mul_ps(a, b);
}

inline Floats add(Floats a, Floats b) {
  return _mm512_add_ps(a, b);
}

inline Floats multiply_add(Floats a, Floats b, Floats c) {
  return _mm512_fmadd_ps(a, b, c);
}

inline Floats floats_of_bytes(Quarter signed_bytes) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(signed_bytes));
}

// Lane i takes from[Of::at(i / 4)].
template <typename Of>
Floats pick(HalfFloats from) {
  return _mm512_permutexvar_ps(
      _mm512_load_si512(Of::lanes.at), _mm512_castps256_ps512(from));
}

// What gemm reads of rows of x, a pair of words each, and of a row of weights.
using Pairs = Words;
using PairInAll = Words;

inline Pairs load_pairs(const int32_t* p) {
  return load64(p);
}

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA
