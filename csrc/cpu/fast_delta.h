// Rows of a gated delta rule's state for one instruction set, on f32 in the
// vectors of kernels_impl.h.
#pragma once

#include "cpu/fast_sums.h"

namespace mlx_gguf::cpu::MLX_GGUF_ISA {
namespace {

constexpr int delta_rows_at_once = 4;

// Tokens one after the other. What a state becomes need not be there for y:
// S' q = g S q + beta (v - g S k) (k . q), so that S is read once.
void gated_delta(const DeltaRows& b) {
  constexpr int R = delta_rows_at_once;
  const int64_t n = b.width;
  for (int64_t t = 0; t < b.tokens; ++t) {
    Vec both = {};
    for (int64_t d = 0; d < n; d += lanes) {
      both += load(b.k + t * n + d) * load(b.q + t * n + d);
    }
    b.both[t] = sum(both);
  }
  for (int64_t r = 0; r < b.rows; r += R) {
    const float* from = b.from + r * n;
    float* to = b.state + r * n;
    for (int64_t t = 0; t < b.tokens; ++t) {
      const float *q = b.q + t * n, *k = b.k + t * n;
      Vec of_k[R] = {}, of_q[R] = {};
      for (int64_t d = 0; d < n; d += lanes) {
        Vec kv = load(k + d), qv = load(q + d);
        _Pragma("GCC unroll 4") for (int i = 0; i < R; ++i) {
          Vec s = load(from + i * n + d);
          of_k[i] += s * kv;
          of_q[i] += s * qv;
        }
      }
      float sums_k[R], sums_q[R], g = b.decay[t];
      four_sums(of_k, sums_k);
      four_sums(of_q, sums_q);
      Vec delta[R];
      for (int i = 0; i < R; ++i) {
        float v = b.v[t * b.rows + r + i];
        float one = b.beta[t] * (v - g * sums_k[i]);
        b.y[t * b.rows + r + i] = g * sums_q[i] + one * b.both[t];
        delta[i] = Vec{} + one;
      }
      for (int64_t d = 0; d < n; d += lanes) {
        Vec kv = load(k + d);
        _Pragma("GCC unroll 4") for (int i = 0; i < R; ++i) {
          store(to + i * n + d, load(from + i * n + d) * g + kv * delta[i]);
        }
      }
      from = to;
    }
  }
}

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA
