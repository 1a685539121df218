// Products of few rows with integer dot products (AVX-512 VNNI), at the speed
// of memory and without rounding x to 8 bits.
//
// x becomes fixed point of 24 bits, one power of two for 256 values, cut into
// three planes of 8 bits: about the precision of f32. Codes of weights are
// unsigned bytes. vpdpbusd sums four products of a code and a plane exactly;
// scales apply in f32 to those sums, and mins and biases to the sums of x.
#pragma once

#include <immintrin.h>

#include "cpu/decode.h"
#include "cpu/kernels.h"

namespace mlx_gguf::cpu::MLX_GGUF_ISA {
namespace {

// The scales and offsets of a super-block of 256 weights, one of each for every
// 16: w = scale * code + offset.
struct Affine {
  __m512 scale;
  __m512 offset;
};

// Codes of 64 consecutive weights, in order.
using Codes = __m512i;

__m256i load32(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

__m128i load16(const uint8_t* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}

// Low nibbles of 32 bytes, then their high nibbles.
__m512i nibbles32(__m256i q) {
  __m512i both = _mm512_broadcast_i64x4(q);
  both = _mm512_mask_srli_epi16(both, 0xffff0000u, both, 4);
  return _mm512_and_si512(both, _mm512_set1_epi8(15));
}

// The same of two pairs of 16 bytes: low, high, low, high.
__m512i nibbles16(__m128i a, __m128i b) {
  __m512i q = _mm512_broadcast_i64x4(_mm256_set_m128i(b, a));
  q = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3), q);
  q = _mm512_mask_srli_epi16(q, 0xff00ff00u, q, 4);
  return _mm512_and_si512(q, _mm512_set1_epi8(15));
}

// Each of 8 values twice.
__m512 twice(__m256 v) {
  return _mm512_permutexvar_ps(
      _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7),
      _mm512_castps256_ps512(v));
}

__m256 small_numbers(uint64_t bytes) {
  return _mm256_cvtepi32_ps(
      _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(bytes))));
}

float half(const uint8_t* p) {
  return _cvtsh_ss(read<uint16_t>(p));
}

// d of the eight 32-weight blocks of a super-block.
template <typename Type>
__m256 eight_d(const uint8_t* b, int at = 0) {
  const int64_t s = Type::bytes;
  auto h = [&](int i) { return read<int16_t>(b + i * s + at); };
  return _mm256_cvtph_ps(
      _mm_setr_epi16(h(0), h(1), h(2), h(3), h(4), h(5), h(6), h(7)));
}

Affine biased(__m256 scale, float bias) {
  return {twice(scale), twice(_mm256_mul_ps(scale, _mm256_set1_ps(-bias)))};
}

// Bytes whose bits are those of two words: 0xff for a set one.
__m512i spread_bits(uint32_t low, uint32_t high) {
  return _mm512_movm_epi8(uint64_t(high) << 32 | low);
}

__m512i set_bits(__m512i codes, __m512i where, char bit) {
  return _mm512_or_si512(codes, _mm512_and_si512(where, _mm512_set1_epi8(bit)));
}

// codes(b, c): weights 64 c to 64 c + 63 of the super-block at b.

template <typename Type>
struct Vnni;

template <typename Type, int at>
__m512i nibble_blocks(const uint8_t* b, int c) {
  const uint8_t* q = b + 2 * c * Type::bytes + at;
  return nibbles16(load16(q), load16(q + Type::bytes));
}

template <>
struct Vnni<Q4_0> {
  static Codes codes(const uint8_t* b, int c) {
    return nibble_blocks<Q4_0, 2>(b, c);
  }
  static Affine affine(const uint8_t* b) {
    return biased(eight_d<Q4_0>(b), 8);
  }
};

template <>
struct Vnni<Q4_1> {
  static Codes codes(const uint8_t* b, int c) {
    return nibble_blocks<Q4_1, 4>(b, c);
  }
  static Affine affine(const uint8_t* b) {
    return {twice(eight_d<Q4_1>(b)), twice(eight_d<Q4_1>(b, 2))};
  }
};

template <typename Type, int at>
__m512i with_fifth_bits(__m512i codes, const uint8_t* b, int c) {
  const uint8_t* p = b + 2 * c * Type::bytes + at;
  uint32_t first = read<uint32_t>(p), second = read<uint32_t>(p + Type::bytes);
  return set_bits(codes, spread_bits(first, second), 16);
}

template <>
struct Vnni<Q5_0> {
  static Codes codes(const uint8_t* b, int c) {
    return with_fifth_bits<Q5_0, 2>(nibble_blocks<Q5_0, 6>(b, c), b, c);
  }
  static Affine affine(const uint8_t* b) {
    return biased(eight_d<Q5_0>(b), 16);
  }
};

template <>
struct Vnni<Q5_1> {
  static Codes codes(const uint8_t* b, int c) {
    return with_fifth_bits<Q5_1, 4>(nibble_blocks<Q5_1, 8>(b, c), b, c);
  }
  static Affine affine(const uint8_t* b) {
    return {twice(eight_d<Q5_1>(b)), twice(eight_d<Q5_1>(b, 2))};
  }
};

template <>
struct Vnni<Q8_0> {
  static Codes codes(const uint8_t* b, int c) {
    const uint8_t* q = b + 2 * c * Q8_0::bytes + 2;
    __m512i v = _mm512_inserti64x4(
        _mm512_castsi256_si512(load32(q)), load32(q + Q8_0::bytes), 1);
    return _mm512_xor_si512(v, _mm512_set1_epi8(-128));
  }
  static Affine affine(const uint8_t* b) {
    return biased(eight_d<Q8_0>(b), 128);
  }
};

// A table of 16 bytes, looked up by nibbles.
__m512i look_up(__m512i nibbles, const int8_t* table, int bias) {
  __m128i t = _mm_add_epi8(
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(table)),
      _mm_set1_epi8(static_cast<char>(bias)));
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(t), nibbles);
}

template <>
struct Vnni<IQ4_NL> {
  static Codes codes(const uint8_t* b, int c) {
    return look_up(nibble_blocks<IQ4_NL, 2>(b, c), iq4_values, 128);
  }
  static Affine affine(const uint8_t* b) {
    return biased(eight_d<IQ4_NL>(b), 128);
  }
};

template <>
struct Vnni<IQ4_XS> {
  static Codes codes(const uint8_t* b, int c) {
    const uint8_t* q = b + 8 + 32 * c;
    return look_up(nibbles16(load16(q), load16(q + 16)), iq4_values, 128);
  }
  static Affine affine(const uint8_t* b) {
    uint64_t low = read<uint32_t>(b + 4);
    low = _pdep_u64(low, 0x0f0f0f0f0f0f0f0full);
    uint64_t high = _pdep_u64(read<uint16_t>(b + 2), 0x3030303030303030ull);
    __m256 scale = _mm256_sub_ps(small_numbers(low | high), _mm256_set1_ps(32));
    return biased(_mm256_mul_ps(scale, _mm256_set1_ps(half(b))), 128);
  }
};

// 6-bit scales and mins as bytes (Q4_K, Q5_K).
Affine scales_mins(const uint8_t* b) {
  uint32_t s = read<uint32_t>(b + 4), m = read<uint32_t>(b + 8);
  uint32_t t = read<uint32_t>(b + 12);
  constexpr uint32_t six = 0x3f3f3f3f, four = 0x0f0f0f0f, two = 0x30303030;
  uint64_t scales = uint64_t((t & four) | (s >> 2 & two)) << 32 | (s & six);
  uint64_t mins = uint64_t((t >> 4 & four) | (m >> 2 & two)) << 32 | (m & six);
  __m256 d = _mm256_set1_ps(half(b)), dmin = _mm256_set1_ps(-half(b + 2));
  return {
      twice(_mm256_mul_ps(small_numbers(scales), d)),
      twice(_mm256_mul_ps(small_numbers(mins), dmin))};
}

template <>
struct Vnni<Q4_K> {
  static Codes codes(const uint8_t* b, int c) {
    return nibbles32(load32(b + 16 + 32 * c));
  }
  static Affine affine(const uint8_t* b) {
    return scales_mins(b);
  }
};

template <>
struct Vnni<Q5_K> {
  static Codes codes(const uint8_t* b, int c) {
    // Bits 2 c and 2 c + 1 of each byte, moved to bit 4.
    __m512i high = _mm512_broadcast_i64x4(load32(b + 16));
    high = _mm512_srli_epi16(high, 2 * c);
    high = _mm512_mask_srli_epi16(high, 0xffff0000u, high, 1);
    high = _mm512_slli_epi16(_mm512_and_si512(high, _mm512_set1_epi8(1)), 4);
    return _mm512_or_si512(nibbles32(load32(b + 48 + 32 * c)), high);
  }
  static Affine affine(const uint8_t* b) {
    return scales_mins(b);
  }
};

// Signed bytes of 16 scales times d.
__m512 sixteen(__m128i scales, float d) {
  return _mm512_mul_ps(
      _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(scales)), _mm512_set1_ps(d));
}

// 32 bytes of bit pairs: pair `first` for 32 weights, then the next one.
__m512i two_pairs(__m256i q, int first) {
  __m512i both = _mm512_broadcast_i64x4(q);
  both = _mm512_srli_epi16(both, 2 * first);
  both = _mm512_mask_srli_epi16(both, 0xffff0000u, both, 2);
  return _mm512_and_si512(both, _mm512_set1_epi8(3));
}

template <>
struct Vnni<Q2_K> {
  static Codes codes(const uint8_t* b, int c) {
    return two_pairs(load32(b + 16 + 32 * (c / 2)), c % 2 * 2);
  }
  static Affine affine(const uint8_t* b) {
    __m128i s = load16(b), four = _mm_set1_epi8(15);
    return {
        sixteen(_mm_and_si128(s, four), half(b + 80)),
        sixteen(_mm_and_si128(_mm_srli_epi16(s, 4), four), -half(b + 82))};
  }
};

template <>
struct Vnni<Q3_K> {
  static Codes codes(const uint8_t* b, int c) {
    __m512i low = two_pairs(load32(b + 32 + 32 * (c / 2)), c % 2 * 2);
    __m512i high = _mm512_broadcast_i64x4(load32(b));
    high = _mm512_srli_epi16(high, 2 * c);
    high = _mm512_mask_srli_epi16(high, 0xffff0000u, high, 1);
    high = _mm512_and_si512(high, _mm512_set1_epi8(1));
    return _mm512_or_si512(low, _mm512_slli_epi16(high, 2));
  }
  static Affine affine(const uint8_t* b) {
    uint64_t low = read<uint64_t>(b + 96);
    uint32_t top = read<uint32_t>(b + 104);
    constexpr uint64_t four = 0x0f0f0f0f0f0f0f0full;
    constexpr uint32_t two = 0x03030303;
    uint64_t first = uint64_t(top >> 2 & two) << 32 | (top & two);
    uint64_t second = uint64_t(top >> 6 & two) << 32 | (top >> 4 & two);
    __m128i scales = _mm_set_epi64x(
        static_cast<int64_t>((low >> 4 & four) | second << 4),
        static_cast<int64_t>((low & four) | first << 4));
    __m512 scale =
        sixteen(_mm_sub_epi8(scales, _mm_set1_epi8(32)), half(b + 108));
    return {scale, _mm512_mul_ps(scale, _mm512_set1_ps(-4))};
  }
};

template <>
struct Vnni<Q6_K> {
  static Codes codes(const uint8_t* b, int c) {
    // Each half of the block: low nibbles of 64 bytes, then high nibbles.
    const uint8_t* q = b + 64 * (c / 2);
    __m512i low = _mm512_loadu_si512(q);
    low = _mm512_and_si512(
        c % 2 ? _mm512_srli_epi16(low, 4) : low, _mm512_set1_epi8(15));
    __m512i high = two_pairs(load32(b + 128 + 32 * (c / 2)), c % 2 * 2);
    return _mm512_or_si512(low, _mm512_slli_epi16(high, 4));
  }
  static Affine affine(const uint8_t* b) {
    __m512 scale = sixteen(load16(b + 192), half(b + 208));
    return {scale, _mm512_mul_ps(scale, _mm512_set1_ps(-32))};
  }
};

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA
