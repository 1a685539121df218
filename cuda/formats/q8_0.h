#pragma once
#include "../common.h"

struct Q8_0 {
  static constexpr int block = 32;
  static constexpr int bytes = 34;
  DEVICE static void decode(const uint8_t* b, uint32_t piece, float* w) {
    const uint16_t* u = (const uint16_t*)b;
    float d = half_to_float(u[0]);
    UNROLL
    for (uint32_t i = 0; i < 8; ++i) {
      uint32_t two = u[1 + 8 * piece + i];
      w[2 * i] = d * float(int8_t(two));
      w[2 * i + 1] = d * float(int8_t(two >> 8));
    }
  }
};
