#pragma once
#include "../common.h"

struct Q8_0 {
  static constant constexpr ushort block = 32;
  static constant constexpr ushort bytes = 34;
  static void decode(device const uchar* b, uint piece, thread float* w) {
    device const ushort* u = (device const ushort*)b;
    float d = float(as_type<half>(u[0]));
    UNROLL
    for (ushort i = 0; i < 8; ++i) {
      char2 q = as_type<char2>(u[1 + 8 * piece + i]);
      w[2 * i] = d * float(q.x);
      w[2 * i + 1] = d * float(q.y);
    }
  }
};
