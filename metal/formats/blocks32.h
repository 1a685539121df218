// The types of 32 weights in nibbles: d, a min with MIN, the fifth bits with
// FIFTH, 16 bytes qs. Byte j of qs holds weight j in its low half and weight
// 16 + j in its high half, so that piece 0 of 16 weights is the low halves and
// piece 1 the high ones. Codes without a min are signed by a bias.
#pragma once
#include "../common.h"

// Codes of one piece of 16 nibbles that start at a 2-byte boundary.
inline void nibbles(device const ushort* qs, uint piece, thread ushort* q) {
  UNROLL
  for (ushort i = 0; i < 8; ++i) {
    ushort two = (qs[i] >> (4 * piece)) & 0x0f0f;
    q[2 * i] = two & 0xff;
    q[2 * i + 1] = two >> 8;
  }
}

template <bool MIN, bool FIFTH>
struct Nibbles {
  static constant constexpr ushort block = 32;
  static constant constexpr ushort bytes = 18 + 2 * MIN + 4 * FIFTH;
  static constant constexpr float bias = MIN ? 0 : FIFTH ? 16 : 8;
  // In 2-byte words.
  static constant constexpr ushort fifth_at = 1 + MIN;
  static constant constexpr ushort qs_at = 1 + MIN + 2 * FIFTH;

  static void decode(device const uchar* b, uint piece, thread float* w) {
    device const ushort* u = (device const ushort*)b;
    float d = float(as_type<half>(u[0]));
    float m = MIN ? float(as_type<half>(u[1])) : 0.0f;
    ushort fifth = FIFTH ? u[fifth_at + piece] : 0;
    ushort q[16];
    nibbles(u + qs_at, piece, q);
    UNROLL
    for (ushort i = 0; i < 16; ++i) {
      ushort code = q[i] | (((fifth >> i) & 1) << 4);
      w[i] = fma(d, float(code) - bias, m);
    }
  }
};
typedef Nibbles<false, false> Q4_0;
typedef Nibbles<true, false> Q4_1;
typedef Nibbles<false, true> Q5_0;
typedef Nibbles<true, true> Q5_1;
