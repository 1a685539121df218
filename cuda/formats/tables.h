// The 4-bit types whose codes index a table of 16 values. The tables lie in the
// device's memory, 64 bytes each, which lanes read at once wherever they point;
// the constant memory would serve one address after the other.
#pragma once
#include "blocks32.h"

__device__ constexpr float iq4_values[16] = {
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// e2m1 doubled, as its exponent byte is biased for whole numbers.
__device__ constexpr float e2m1_values[16] = {
    0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

struct IQ4_NL {
  static constexpr int block = 32;
  static constexpr int bytes = 18;
  DEVICE static void decode(const uint8_t* b, uint32_t piece, float* w) {
    const uint16_t* u = (const uint16_t*)b;
    float d = half_to_float(u[0]);
    uint32_t q[16];
    nibbles(u + 1, piece, q);
    UNROLL
    for (uint32_t i = 0; i < 16; ++i) {
      w[i] = d * iq4_values[q[i]];
    }
  }
};

// 17 bytes: nothing in a row is aligned, every load is a byte.
struct MXFP4 {
  static constexpr int block = 32;
  static constexpr int bytes = 17;
  DEVICE static void decode(const uint8_t* b, uint32_t piece, float* w) {
    // 2^(e - 128), below the normal range for e of 0 and 1.
    uint32_t e = b[0];
    float d = as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
    UNROLL
    for (uint32_t i = 0; i < 16; ++i) {
      w[i] = d * e2m1_values[(b[1 + i] >> (4 * piece)) & 15];
    }
  }
};

struct IQ4_XS {
  static constexpr int block = 256;
  static constexpr int bytes = 136;
  DEVICE static void decode(const uint8_t* b, uint32_t piece, float* w) {
    const uint16_t* u = (const uint16_t*)b;
    uint32_t g = piece / 2;
    uint32_t low = u[2 + g / 4] >> (4 * (g % 4)) & 15,
             high = u[1] >> (2 * g) & 3;
    float d = half_to_float(u[0]) * (float(low | high << 4) - 32.0f);
    uint32_t q[16];
    nibbles(u + 4 + 8 * g, piece % 2, q);
    UNROLL
    for (uint32_t i = 0; i < 16; ++i) {
      w[i] = d * iq4_values[q[i]];
    }
  }
};
