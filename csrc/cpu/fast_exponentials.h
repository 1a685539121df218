// Exponentials of f32 in the vectors of kernels_impl.h, for one instruction
// set, and what is made of them.
#pragma once

#include "cpu/kernels_impl.h"

namespace mlx_gguf::cpu::MLX_GGUF_ISA {
namespace {

typedef int32_t IntVec
    __attribute__((vector_size(lanes * 4), aligned(4), may_alias));

Vec splat(float f) {
  return Vec{f, f, f, f, f, f, f, f, f, f, f, f, f, f, f, f};
}

// e^x for x up to 87, to less than 2e-7 of it; 0 where that is below 2^-126.
Vec exponential(Vec x) {
  const Vec least = splat(-87.0f), to_integer = splat(0x1.8p23f);
  Vec held = x < least ? least : x;
  Vec shifted = held * splat(0x1.715476p0f) + to_integer; // log2(e)
  Vec n = shifted - to_integer;
  // ln 2 in two parts; multiples of the first one are exact.
  Vec r = held - n * splat(0x1.62e4p-1f);
  r = r - n * splat(0x1.7f7d1cp-20f);
  Vec y = splat(1.0f / 5040);
  y = y * r + splat(1.0f / 720);
  y = y * r + splat(1.0f / 120);
  y = y * r + splat(1.0f / 24);
  y = y * r + splat(1.0f / 6);
  y = y * r + splat(0.5f);
  y = y * r + splat(1.0f);
  y = y * r + splat(1.0f);
  IntVec power = (IntVec)shifted + (127 - 0x4b400000); // the bits of 1.5 * 2^23
  y = y * (Vec)(power << 23);
  return x < least ? splat(0.0f) : y;
}

void exponentials(const float* x, int64_t n, float* largest, float* sum_out) {
  Vec most = splat(x[0]), bad = {};
  float tail[lanes];
  auto each = [&](auto&& use) {
    int64_t i = 0;
    for (; i + lanes <= n; i += lanes) {
      use(load(x + i));
    }
    if (i < n) { // repeats a value, whose share is taken off below
      for (int j = 0; j < lanes; ++j) {
        tail[j] = x[i + j < n ? i + j : n - 1];
      }
      use(load(tail));
    }
  };
  each([&](Vec v) {
    most = v > most ? v : most;
    bad += v * splat(0.0f); // 0 but for infinities and NaN
  });
  float top = x[0];
  for (int j = 0; j < lanes; ++j) {
    top = most[j] > top ? most[j] : top;
  }
  Vec total = {}, last = {};
  each([&](Vec v) { total += last = exponential(v - splat(top)); });
  int64_t repeated = (lanes - n % lanes) % lanes;
  *largest = top;
  *sum_out =
      sum(total) - static_cast<float>(repeated) * last[lanes - 1] + sum(bad);
}

void gate(const float* x, bool gelu, int64_t n, float* y) {
  auto gated = [&](Vec v) {
    // Twice the argument of the tanh: sqrt(2 / pi) (v + 0.044715 v^3).
    Vec z = v;
    if (gelu) {
      z = v * (splat(1.5957692f) + splat(0.071354814f) * v * v);
    }
    Vec share = splat(1.0f) / (splat(1.0f) + exponential(-z));
    return v * (z < splat(-87.0f) ? splat(0.0f) : share);
  };
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    store(y + i, gated(load(x + i)));
  }
  if (i < n) {
    float tail[lanes] = {};
    std::memcpy(tail, x + i, (n - i) * sizeof(float));
    store(tail, gated(load(tail)));
    std::memcpy(y + i, tail, (n - i) * sizeof(float));
  }
}

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA
