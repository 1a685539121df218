// Small whole numbers as halves without a convert: two 10-bit codes in the
// halves of a word become two halves, each code divided by `inverse`.
#pragma once
#include "../common.h"

// A code is the mantissa of an fp16 subnormal, code * 2^-24. Widened to f32 it
// is exact; nothing is computed in half, where the language lets subnormals be
// flushed. `half_test` tells whether they survive the widening. Scales are
// codes too, so x of f32 or bf16 below about 1e-23 gives sums that GPUs flush.
struct Subnormal {
  static constant constexpr float inverse = 16777216.0f;
  static half2 pair(uint codes) {
    return as_type<half2>(codes);
  }
};

// A code under the exponent of 1024, which is then taken away: exact, and all
// numbers are normal.
struct Magic {
  static constant constexpr float inverse = 1.0f;
  static half2 pair(uint codes) {
    return as_type<half2>(codes | 0x64006400) - half2(half(1024));
  }
};

// sum += x0 * h.x + x1 * h.y, in f32.
inline float fma2(float x0, float x1, half2 h, float sum) {
  return fma(x1, float(h.y), fma(x0, float(h.x), sum));
}

// The convert-free dots: see each type.
template <typename F, typename Codes>
struct CodeDot;
