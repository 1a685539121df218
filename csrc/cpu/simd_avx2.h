// Vectors of 64 bytes with AVX2: two registers.
#pragma once

#include "cpu/simd_x86.h"

namespace mlx_gguf::cpu::MLX_GGUF_ISA {
namespace {

struct Bytes {
  __m256i low, high;
};
using Words = Bytes;
using Ints = Bytes;
struct Floats {
  __m256 low, high;
};

inline Bytes load64(const void* p) {
  auto bytes = static_cast<const uint8_t*>(p);
  return {load32(bytes), load32(bytes + 32)};
}

inline void store_words(int16_t* to, Words a) {
  _mm256_store_si256(reinterpret_cast<__m256i*>(to), a.low);
  _mm256_store_si256(reinterpret_cast<__m256i*>(to + 16), a.high);
}

inline Words pair_in_all(const int16_t* p) {
  __m256i pair = _mm256_set1_epi32(two_words(p));
  return {pair, pair};
}

inline Bytes two_halves(Half a, Half b) {
  return {a, b};
}

inline Floats two_halves(HalfFloats a, HalfFloats b) {
  return {a, b};
}

inline Bytes both_halves(Half a) {
  return {a, a};
}

inline Bytes all_quarters(Quarter a) {
  return both_halves(_mm256_broadcastsi128_si256(a));
}

inline Bytes all_eighths(uint64_t a) {
  return both_halves(_mm256_set1_epi64x(static_cast<int64_t>(a)));
}

inline Bytes bytes_of(int value) {
  return both_halves(_mm256_set1_epi8(static_cast<char>(value)));
}

inline Words words_of(int value) {
  return both_halves(_mm256_set1_epi16(static_cast<short>(value)));
}

inline Quarter first_quarter(Bytes a) {
  return _mm256_castsi256_si128(a.low);
}

inline Bytes bit_and(Bytes a, Bytes b) {
  return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)};
}

inline Bytes bit_or(Bytes a, Bytes b) {
  return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)};
}

inline Bytes add_bytes(Bytes a, Bytes b) {
  return {_mm256_add_epi8(a.low, b.low), _mm256_add_epi8(a.high, b.high)};
}

inline Words add_words(Words a, Words b) {
  return {_mm256_add_epi16(a.low, b.low), _mm256_add_epi16(a.high, b.high)};
}

inline Words multiply_words(Words a, Words b) {
  return {_mm256_mullo_epi16(a.low, b.low), _mm256_mullo_epi16(a.high, b.high)};
}

template <int low, int high>
Words shift_right_halves(Words a) {
  return {
      low ? _mm256_srli_epi16(a.low, low) : a.low,
      high ? _mm256_srli_epi16(a.high, high) : a.high};
}

template <int n>
Words shift_right(Words a) {
  return shift_right_halves<n, n>(a);
}

template <int n>
Words shift_right_signed(Words a) {
  return {_mm256_srai_epi16(a.low, n), _mm256_srai_epi16(a.high, n)};
}

template <int n>
Words shift_left(Words a) {
  return {_mm256_slli_epi16(a.low, n), _mm256_slli_epi16(a.high, n)};
}

inline Bytes shuffle(Bytes table, Bytes index) {
  return {
      _mm256_shuffle_epi8(table.low, index.low),
      _mm256_shuffle_epi8(table.high, index.high)};
}

// Bytes whose bits are those of a word: 0xff for a set one.
inline __m256i spread_bits(uint32_t bits) {
  const __m256i byte = _mm256_setr_epi64x(
      0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i bit =
      _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
  __m256i v = _mm256_set1_epi32(static_cast<int>(bits));
  v = _mm256_shuffle_epi8(v, byte);
  return _mm256_cmpeq_epi8(_mm256_and_si256(v, bit), bit);
}

inline Bytes add_where(Bytes a, uint64_t bits, int value) {
  Bytes where{
      spread_bits(static_cast<uint32_t>(bits)),
      spread_bits(static_cast<uint32_t>(bits >> 32))};
  return add_bytes(a, bit_and(where, bytes_of(value)));
}

inline Words multiply_bytes(Bytes codes, Bytes scales) {
  return {
      _mm256_maddubs_epi16(codes.low, scales.low),
      _mm256_maddubs_epi16(codes.high, scales.high)};
}

inline Ints dot(Ints sum, Words a, Words b) {
  return {
      _mm256_add_epi32(sum.low, _mm256_madd_epi16(a.low, b.low)),
      _mm256_add_epi32(sum.high, _mm256_madd_epi16(a.high, b.high))};
}

inline Ints no_ints() {
  return both_halves(_mm256_setzero_si256());
}

inline Floats to_floats(Ints a) {
  return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)};
}

inline Floats load_floats(const float* p) {
  return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}

inline void store_floats(float* p, Floats a) {
  _mm256_storeu_ps(p, a.low);
  _mm256_storeu_ps(p + 8, a.high);
}

inline Floats floats_of(float value) {
  return {_mm256_set1_ps(value), _mm256_set1_ps(value)};
}

inline Floats floats_of(float low, float high) {
  return {_mm256_set1_ps(low), _mm256_set1_ps(high)};
}

inline Floats repeat_floats(const float* eight) {
  return {_mm256_loadu_ps(eight), _mm256_loadu_ps(eight)};
}

inline HalfFloats first_half(Floats a) {
  return a.low;
}

inline HalfFloats second_half(Floats a) {
  return a.high;
}

inline Floats multiply(Floats a, Floats b) {
  return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}

inline Floats add(Floats a, Floats b) {
  return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}

inline Floats multiply_add(Floats a, Floats b, Floats c) {
  return {
      _mm256_fmadd_ps(a.low, b.low, c.low),
      _mm256_fmadd_ps(a.high, b.high, c.high)};
}

inline Floats floats_of_bytes(Quarter signed_bytes) {
  return {
      _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(signed_bytes)),
      _mm256_cvtepi32_ps(
          _mm256_cvtepi8_epi32(_mm_srli_si128(signed_bytes, 8)))};
}

template <typename Of>
Floats pick(HalfFloats from) {
  auto at = reinterpret_cast<const __m256i*>(Of::lanes.at);
  return {
      _mm256_permutevar8x32_ps(from, _mm256_load_si256(at)),
      _mm256_permutevar8x32_ps(from, _mm256_load_si256(at + 1))};
}

using Pairs = Words;
using PairInAll = Words;

inline Pairs load_pairs(const int32_t* p) {
  return load64(p);
}

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA
