// The k-quants: 256 weights a block. decode gives piece p, weights 16 p to
// 16 p + 15; layouts as in the table of tensor types.
#pragma once
#include "../common.h"

// 16 weights d * code + m; two(i) has codes 2 i and 2 i + 1 in its bytes.
template <typename Two>
DEVICE void decode_codes(float d, float m, float* w, const Two& two) {
  UNROLL
  for (uint32_t i = 0; i < 8; ++i) {
    uint32_t codes = two(i);
    w[2 * i] = fma(d, float(codes & 0xff), m);
    w[2 * i + 1] = fma(d, float(codes >> 8), m);
  }
}

struct Q2_K {
  static constexpr int block = 256;
  static constexpr int bytes = 84;
  DEVICE static void decode(const uint8_t* b, uint32_t piece, float* w) {
    const uint16_t* u = (const uint16_t*)b;
    uint32_t half_block = piece / 8, plane = piece % 8 / 2, part = piece % 2;
    uint32_t both = (u[piece / 2] >> (8 * part)) & 0xff;
    float d = half_to_float(u[40]) * float(both & 15);
    float m = half_to_float(u[41]) * float(both >> 4);
    uint32_t first = 8 + 16 * half_block + 8 * part;
    decode_codes(d, -m, w, [&](uint32_t i) {
      return u[first + i] >> (2 * plane) & 0x0303;
    });
  }
};

struct Q3_K {
  static constexpr int block = 256;
  static constexpr int bytes = 110;
  DEVICE static void decode(const uint8_t* b, uint32_t piece, float* w) {
    const uint16_t* u = (const uint16_t*)b;
    uint32_t half_block = piece / 8, plane = piece % 8 / 2, part = piece % 2;
    // Scale p: 4 low bits in byte p % 8 of 96, 2 high bits in byte p % 4 of
    // 104.
    uint32_t low = u[48 + piece % 8 / 2] >> (8 * part + 4 * (piece / 8));
    uint32_t high = u[52 + piece % 4 / 2] >> (8 * part + 2 * (piece / 4));
    float scale = float((low & 15) | ((high & 3) << 4)) - 32.0f;
    float d = half_to_float(u[54]) * scale;
    uint32_t first = 16 + 16 * half_block + 8 * part;
    // A clear bit of hmask takes 4 away.
    decode_codes(d, -4.0f * d, w, [&](uint32_t i) {
      return u[first + i] >> (2 * plane) & 0x0303 |
             (u[8 * part + i] >> (piece / 2) & 0x0101) << 2;
    });
  }
};

// Q4_K, and Q5_K with fifth bits.
template <bool FIFTH>
struct Q45_K {
  static constexpr int block = 256;
  static constexpr int bytes = 144 + 32 * FIFTH;

  // The 6-bit scale (x) and min (y) of group j.
  DEVICE static float2 scale_min(const uint8_t* b, uint32_t j) {
    const uint16_t* s = (const uint16_t*)b + 2;
    uint32_t shift = 8 * (j % 2), at = j % 4 / 2;
    uint32_t a = s[at] >> shift, m = s[at + 2] >> shift;
    if (j >= 4) {
      uint32_t low = s[at + 4] >> shift;
      a = (low & 15) | ((a & 0xc0) >> 2);
      m = ((low >> 4) & 15) | ((m & 0xc0) >> 2);
    }
    return make_float2(float(a & 63), float(m & 63));
  }
  DEVICE static void decode(const uint8_t* b, uint32_t piece, float* w) {
    const uint16_t* u = (const uint16_t*)b;
    uint32_t j = piece / 2;
    float2 sm = scale_min(b, j);
    float d = half_to_float(u[0]) * sm.x;
    float m = half_to_float(u[1]) * sm.y;
    uint32_t fifth = 8 + 8 * (piece % 2);
    uint32_t first = 8 + 16 * FIFTH + 16 * (j / 2) + 8 * (piece % 2);
    decode_codes(d, -m, w, [&](uint32_t i) {
      uint32_t two = u[first + i] >> (4 * (j % 2)) & 0x0f0f;
      return FIFTH ? two | (u[fifth + i] >> j & 0x0101) << 4 : two;
    });
  }
};
typedef Q45_K<false> Q4_K;
typedef Q45_K<true> Q5_K;

struct Q6_K {
  static constexpr int block = 256;
  static constexpr int bytes = 210;
  DEVICE static void decode(const uint8_t* b, uint32_t piece, float* w) {
    const uint16_t* u = (const uint16_t*)b;
    uint32_t n = piece / 8, k = piece % 8 / 2, part = piece % 2;
    int8_t scale = int8_t(u[96 + piece / 2] >> (8 * part));
    float d = half_to_float(u[104]) * float(scale);
    uint32_t low = 32 * n + 16 * (k % 2) + 8 * part;
    uint32_t high = 64 + 16 * n + 8 * part;
    decode_codes(d, -32.0f * d, w, [&](uint32_t i) {
      return u[low + i] >> (4 * (k / 2)) & 0x0f0f |
             (u[high + i] >> (2 * k) & 0x0303) << 4;
    });
  }
};
