// The k-quants: 256 weights a block. decode gives piece p, weights 16 p to
// 16 p + 15; layouts as in the table of tensor types.
#pragma once
#include "../common.h"

struct Q2_K {
  static constant constexpr ushort block = 256;
  static constant constexpr ushort bytes = 84;
  static void decode(device const uchar* b, uint piece, thread float* w) {
    device const ushort* u = (device const ushort*)b;
    uint half_block = piece / 8, plane = piece % 8 / 2, part = piece % 2;
    ushort both = (u[piece / 2] >> (8 * part)) & 0xff;
    float d = float(as_type<half>(u[40])) * float(both & 15);
    float m = float(as_type<half>(u[41])) * float(both >> 4);
    uint first = 8 + 16 * half_block + 8 * part;
    UNROLL
    for (ushort i = 0; i < 8; ++i) {
      ushort two = (u[first + i] >> (2 * plane)) & 0x0303;
      w[2 * i] = fma(d, float(two & 0xff), -m);
      w[2 * i + 1] = fma(d, float(two >> 8), -m);
    }
  }
};

struct Q3_K {
  static constant constexpr ushort block = 256;
  static constant constexpr ushort bytes = 110;
  static void decode(device const uchar* b, uint piece, thread float* w) {
    device const ushort* u = (device const ushort*)b;
    uint half_block = piece / 8, plane = piece % 8 / 2, part = piece % 2;
    // Scale p: 4 low bits in byte p % 8 of 96, 2 high bits in byte p % 4 of
    // 104.
    uint low = u[48 + piece % 8 / 2] >> (8 * part + 4 * (piece / 8));
    uint high = u[52 + piece % 4 / 2] >> (8 * part + 2 * (piece / 4));
    float scale = float((low & 15) | ((high & 3) << 4)) - 32.0f;
    float d = float(as_type<half>(u[54])) * scale;
    uint first = 16 + 16 * half_block + 8 * part;
    UNROLL
    for (ushort i = 0; i < 8; ++i) {
      ushort two = (u[first + i] >> (2 * plane)) & 0x0303;
      // A clear bit of hmask takes 4 away.
      ushort keep = (u[8 * part + i] >> (piece / 2)) & 0x0101;
      w[2 * i] = d * (float((two & 0xff) | ((keep & 0xff) << 2)) - 4.0f);
      w[2 * i + 1] = d * (float((two >> 8) | ((keep >> 8) << 2)) - 4.0f);
    }
  }
};

// The 6-bit scale (x) and min (y) of group j of a Q4_K or Q5_K block.
inline float2 scale_min(device const uchar* b, uint j) {
  device const ushort* s = (device const ushort*)b + 2;
  uint shift = 8 * (j % 2), at = j % 4 / 2;
  uint a = s[at] >> shift, m = s[at + 2] >> shift;
  if (j >= 4) {
    uint low = s[at + 4] >> shift;
    a = (low & 15) | ((a & 0xc0) >> 2);
    m = ((low >> 4) & 15) | ((m & 0xc0) >> 2);
  }
  return float2(float(a & 63), float(m & 63));
}

struct Q4_K {
  static constant constexpr ushort block = 256;
  static constant constexpr ushort bytes = 144;
  static void decode(device const uchar* b, uint piece, thread float* w) {
    device const ushort* u = (device const ushort*)b;
    uint j = piece / 2;
    float2 sm = scale_min(b, j);
    float d = float(as_type<half>(u[0])) * sm.x;
    float m = float(as_type<half>(u[1])) * sm.y;
    uint first = 8 + 16 * (j / 2) + 8 * (piece % 2);
    UNROLL
    for (ushort i = 0; i < 8; ++i) {
      ushort two = (u[first + i] >> (4 * (j % 2))) & 0x0f0f;
      w[2 * i] = fma(d, float(two & 0xff), -m);
      w[2 * i + 1] = fma(d, float(two >> 8), -m);
    }
  }
};

struct Q5_K {
  static constant constexpr ushort block = 256;
  static constant constexpr ushort bytes = 176;
  static void decode(device const uchar* b, uint piece, thread float* w) {
    device const ushort* u = (device const ushort*)b;
    uint j = piece / 2;
    float2 sm = scale_min(b, j);
    float d = float(as_type<half>(u[0])) * sm.x;
    float m = float(as_type<half>(u[1])) * sm.y;
    uint fifth = 8 + 8 * (piece % 2);
    uint first = 24 + 16 * (j / 2) + 8 * (piece % 2);
    UNROLL
    for (ushort i = 0; i < 8; ++i) {
      ushort two = (u[first + i] >> (4 * (j % 2))) & 0x0f0f;
      two |= ((u[fifth + i] >> j) & 0x0101) << 4;
      w[2 * i] = fma(d, float(two & 0xff), -m);
      w[2 * i + 1] = fma(d, float(two >> 8), -m);
    }
  }
};

struct Q6_K {
  static constant constexpr ushort block = 256;
  static constant constexpr ushort bytes = 210;
  static void decode(device const uchar* b, uint piece, thread float* w) {
    device const ushort* u = (device const ushort*)b;
    uint n = piece / 8, k = piece % 8 / 2, part = piece % 2;
    char scale = char((u[96 + piece / 2] >> (8 * part)) & 0xff);
    float d = float(as_type<half>(u[104])) * float(scale);
    uint low = 32 * n + 16 * (k % 2) + 8 * part;
    uint high = 64 + 16 * n + 8 * part;
    UNROLL
    for (ushort i = 0; i < 8; ++i) {
      ushort two = (u[low + i] >> (4 * (k / 2))) & 0x0f0f;
      two |= ((u[high + i] >> (2 * k)) & 0x0303) << 4;
      w[2 * i] = d * (float(two & 0xff) - 32.0f);
      w[2 * i + 1] = d * (float(two >> 8) - 32.0f);
    }
  }
};
