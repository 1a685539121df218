// Vectors of 64 bytes on x86: one register with AVX-512, two with AVX2. The
// kernels are written once, over these.
#pragma once

#include <immintrin.h>

#include "cpu/decode.h"

// Before loops whose sums are to stay in registers.
#define MLX_GGUF_UNROLL _Pragma("GCC unroll 16")

namespace mlx_gguf::cpu::MLX_GGUF_ISA {
namespace {

inline __m128i load16(const uint8_t* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}

inline __m256i load32(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

inline int32_t two_words(const int16_t* p) {
  int32_t words;
  std::memcpy(&words, p, sizeof(words));
  return words;
}

// Constants of a vector, from a function of the place.
template <typename T, int n>
struct alignas(64) Table {
  T at[n];
  template <typename F>
  constexpr explicit Table(F f) : at{} {
    for (int i = 0; i < n; ++i) {
      at[i] = static_cast<T>(f(i));
    }
  }
};

#ifdef __AVX512BW__

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

inline Bytes two_halves(__m256i a, __m256i b) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
}

inline Floats two_halves(__m256 a, __m256 b) {
  return _mm512_insertf32x8(_mm512_castps256_ps512(a), b, 1);
}

inline Bytes both_halves(__m256i a) {
  return _mm512_broadcast_i64x4(a);
}

inline Bytes all_quarters(__m128i a) {
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

inline __m128i first_quarter(Bytes a) {
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

inline Ints no_ints() {
  return _mm512_setzero_si512();
}

inline Ints ints_of(int value) {
  return _mm512_set1_epi32(value);
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

inline __m256 first_half(Floats a) {
  return _mm512_castps512_ps256(a);
}

inline __m256 second_half(Floats a) {
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

inline Floats floats_of_bytes(__m128i signed_bytes) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(signed_bytes));
}

// Lane i takes from[index[i]].
inline Floats pick(__m256 from, const Table<int32_t, 16>& index) {
  return _mm512_permutexvar_ps(
      _mm512_load_si512(index.at), _mm512_castps256_ps512(from));
}

#else

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

inline Bytes two_halves(__m256i a, __m256i b) {
  return {a, b};
}

inline Floats two_halves(__m256 a, __m256 b) {
  return {a, b};
}

inline Bytes both_halves(__m256i a) {
  return {a, a};
}

inline Bytes all_quarters(__m128i a) {
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

inline __m128i first_quarter(Bytes a) {
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

inline Ints ints_of(int value) {
  return both_halves(_mm256_set1_epi32(value));
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

inline __m256 first_half(Floats a) {
  return a.low;
}

inline __m256 second_half(Floats a) {
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

inline Floats floats_of_bytes(__m128i signed_bytes) {
  return {
      _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(signed_bytes)),
      _mm256_cvtepi32_ps(
          _mm256_cvtepi8_epi32(_mm_srli_si128(signed_bytes, 8)))};
}

inline Floats pick(__m256 from, const Table<int32_t, 16>& index) {
  auto at = reinterpret_cast<const __m256i*>(index.at);
  return {
      _mm256_permutevar8x32_ps(from, _mm256_load_si256(at)),
      _mm256_permutevar8x32_ps(from, _mm256_load_si256(at + 1))};
}

#endif

inline __m256 fold(Floats a) {
  return _mm256_add_ps(first_half(a), second_half(a));
}

// The sum of all lanes, always by the same tree.
inline float sum_lanes(__m256 a) {
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA
