// The 4-bit types whose codes index a table of 16 values.
#pragma once
#include "blocks32.h"

constant constexpr float iq4_values[16] = {
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// e2m1 doubled, as its exponent byte is biased for whole numbers.
constant constexpr float e2m1_values[16] = {
    0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

struct IQ4_NL {
  static constant constexpr ushort block = 32;
  static constant constexpr ushort bytes = 18;
  typedef ushort Element;
  static float value(uint i) {
    return iq4_values[i];
  }
  static float scale(device const ushort* b, uint i) {
    return float(as_type<half>(b[i]));
  }
  // 4 bytes of qs from byte j on, of the block at Element i.
  static uint codes(device const ushort* b, uint i, uint j) {
    return word(b, i + 1 + j / 2);
  }
  static void decode(device const uchar* b, uint piece, thread float* w) {
    device const ushort* u = (device const ushort*)b;
    float d = float(as_type<half>(u[0]));
    ushort q[16];
    nibbles(u + 1, piece, q);
    UNROLL
    for (ushort i = 0; i < 16; ++i) {
      w[i] = d * iq4_values[q[i]];
    }
  }
};

// 17 bytes: nothing in a row is aligned, every load is a byte.
struct MXFP4 {
  static constant constexpr ushort block = 32;
  static constant constexpr ushort bytes = 17;
  typedef uchar Element;
  static float value(uint i) {
    return e2m1_values[i];
  }
  // 2^(e - 128), below the normal range for e of 0 and 1.
  static float scale(device const uchar* b, uint i) {
    uint e = b[i];
    return as_type<float>(e < 2 ? 0x00200000u << e : (e - 1) << 23);
  }
  static uint codes(device const uchar* b, uint i, uint j) {
    uint at = i + 1 + j;
    return as_type<uint>(uchar4(b[at], b[at + 1], b[at + 2], b[at + 3]));
  }
  static void decode(device const uchar* b, uint piece, thread float* w) {
    float d = scale(b, 0);
    UNROLL
    for (ushort i = 0; i < 16; ++i) {
      w[i] = d * e2m1_values[(b[1 + i] >> (4 * piece)) & 15];
    }
  }
};

struct IQ4_XS {
  static constant constexpr ushort block = 256;
  static constant constexpr ushort bytes = 136;
  // d * (scale of group g - 32), from the first 8 bytes of a block.
  static float scale(uint first, uint low, uint g) {
    uint ls = ((low >> (4 * g)) & 15) | (((first >> (16 + 2 * g)) & 3) << 4);
    return float(as_type<half2>(first).x) * (float(ls) - 32.0f);
  }
  static void decode(device const uchar* b, uint piece, thread float* w) {
    device const uint* u = (device const uint*)b;
    float d = scale(u[0], u[1], piece / 2);
    ushort q[16];
    nibbles((device const ushort*)b + 4 + 8 * (piece / 2), piece % 2, q);
    UNROLL
    for (ushort i = 0; i < 16; ++i) {
      w[i] = d * iq4_values[q[i]];
    }
  }
};
