// The types of 32 weights in nibbles: d, a min with MIN, the fifth bits with
// FIFTH, 16 bytes qs. Byte j of qs holds weight j in its low half and weight
// 16 + j in its high half, so that piece 0 of 16 weights is the low halves and
// piece 1 the high ones. Codes without a min are signed by a bias.
#pragma once
#include "../common.h"

// Codes of one piece of 16 nibbles that start at a 2-byte boundary.
DEVICE void nibbles(const uint16_t* qs, uint32_t piece, uint32_t* q) {
  UNROLL
  for (uint32_t i = 0; i < 8; ++i) {
    uint32_t two = (qs[i] >> (4 * piece)) & 0x0f0f;
    q[2 * i] = two & 0xff;
    q[2 * i + 1] = two >> 8;
  }
}

template <bool MIN, bool FIFTH>
struct Nibbles {
  static constexpr int block = 32;
  static constexpr int bytes = 18 + 2 * MIN + 4 * FIFTH;
  static constexpr float bias = MIN ? 0 : FIFTH ? 16 : 8;
  // In 2-byte words.
  static constexpr int fifth_at = 1 + MIN;
  static constexpr int qs_at = 1 + MIN + 2 * FIFTH;

  DEVICE static void decode(const uint8_t* b, uint32_t piece, float* w) {
    const uint16_t* u = (const uint16_t*)b;
    float d = half_to_float(u[0]);
    float m = MIN ? half_to_float(u[1]) : 0.0f;
    uint32_t fifth = FIFTH ? u[fifth_at + piece] : 0;
    uint32_t q[16];
    nibbles(u + qs_at, piece, q);
    UNROLL
    for (uint32_t i = 0; i < 16; ++i) {
      uint32_t code = q[i] | (((fifth >> i) & 1) << 4);
      w[i] = fma(d, float(code) - bias, m);
    }
  }
};
typedef Nibbles<false, false> Q4_0;
typedef Nibbles<true, false> Q4_1;
typedef Nibbles<false, true> Q5_0;
typedef Nibbles<true, true> Q5_1;
