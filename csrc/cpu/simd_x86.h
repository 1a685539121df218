// Vectors of 16 and 32 bytes on x86, parts of those of 64.
#pragma once

#include <immintrin.h>

#include "cpu/simd_table.h"

namespace mlx_gguf::cpu::MLX_GGUF_ISA {
namespace {

using Quarter = __m128i;   // 16 bytes
using Half = __m256i;      // 32 bytes
using HalfFloats = __m256; // 8

inline Quarter load16(const void* p) {
  return _mm_loadu_si128(static_cast<const __m128i*>(p));
}

inline Half load32(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}

// Eight bytes each.
inline Quarter quarter_of(uint64_t a, uint64_t b) {
  return _mm_set_epi64x(static_cast<int64_t>(b), static_cast<int64_t>(a));
}

// Four bytes each.
inline Quarter quarter_of(int32_t a, int32_t b, int32_t c, int32_t d) {
  return _mm_setr_epi32(a, b, c, d);
}

// The first eight bytes; the others are zeros.
inline Quarter first_eighth(uint64_t a) {
  return _mm_cvtsi64_si128(static_cast<int64_t>(a));
}

// The first eight bytes of each.
inline Quarter first_eighths(Quarter a, Quarter b) {
  return _mm_unpacklo_epi64(a, b);
}

inline Half half_of(Quarter a, Quarter b) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1);
}

inline Quarter high_nibbles(Quarter q) {
  return _mm_and_si128(_mm_srli_epi16(q, 4), _mm_set1_epi8(15));
}

inline Quarter subtract_bytes(Quarter a, int value) {
  return _mm_sub_epi8(a, _mm_set1_epi8(static_cast<char>(value)));
}

// Words at even places to the first half, the others to the second.
inline Quarter split_words(Quarter a) {
  const __m128i order =
      _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  return _mm_shuffle_epi8(a, order);
}

// Those of 16, to places aligned to 16 bytes.
inline void split_words(const int16_t* from, int16_t* even, int16_t* odd) {
  __m128i a = split_words(load16(from)), b = split_words(load16(from + 8));
  _mm_store_si128(reinterpret_cast<__m128i*>(even), _mm_unpacklo_epi64(a, b));
  _mm_store_si128(reinterpret_cast<__m128i*>(odd), _mm_unpackhi_epi64(a, b));
}

inline HalfFloats floats_of_halves(Quarter h) {
  return _mm256_cvtph_ps(h);
}

inline HalfFloats eight_of(float value) {
  return _mm256_set1_ps(value);
}

inline HalfFloats eight_of_half(uint16_t value) {
  return _mm256_cvtph_ps(_mm_set1_epi16(static_cast<short>(value)));
}

inline HalfFloats floats_of_eight(Quarter signed_bytes) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(signed_bytes));
}

// 2^(e - 128) of each byte e.
inline HalfFloats powers_of_two(uint64_t exponents) {
  __m256i e = _mm256_cvtepu8_epi32(first_eighth(exponents));
  __m256i normal =
      _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
  __m256i small = _mm256_sllv_epi32(_mm256_set1_epi32(1 << 21), e);
  __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e);
  return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, small, is_small));
}

// To a place aligned to 32 bytes.
inline void store_eight(float* p, HalfFloats a) {
  _mm256_store_ps(p, a);
}

inline HalfFloats multiply(HalfFloats a, HalfFloats b) {
  return _mm256_mul_ps(a, b);
}

inline HalfFloats add(HalfFloats a, HalfFloats b) {
  return _mm256_add_ps(a, b);
}

inline HalfFloats multiply_add(HalfFloats a, HalfFloats b, HalfFloats c) {
  return _mm256_fmadd_ps(a, b, c);
}

// The sum of all lanes, always by the same tree.
inline float sum_lanes(HalfFloats a) {
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA
