// Whether fp16 subnormals survive on this device in the way the convert-free
// dots use them, as an operand of a 32-bit fma: y[i] must be the two codes in
// the halves of w[i] as floats.
#pragma once
#include "dots/codes.h"

template <typename Codes>
[[kernel]] void half_test(
    device const uint* w [[buffer(0)]],
    device float2* y [[buffer(3)]],
    uint i [[thread_position_in_grid]]) {
  half2 h = Codes::pair(w[i]);
  y[i] = float2(
      fma(float(h.x), Codes::inverse, 0.0f),
      fma(float(h.y), Codes::inverse, 0.0f));
}
