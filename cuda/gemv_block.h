// gemv of any type in f32 arithmetic: for weights that are plain numbers, and
// where a block of a packed type lies too unevenly for copies. A warp has one
// row of w and 1 to 8 rows of x, whose sums do not depend on each other.
#pragma once
#include "rows.h"

template <typename F, typename T>
__global__ void __launch_bounds__(128) gemv_block(
    const uint8_t* __restrict__ w,
    const T* __restrict__ x,
    const T* c,
    T* y,
    Params p,
    const uint32_t* lhs,
    const uint32_t* rhs) {
  uint32_t lane = threadIdx.x % 32;
  uint32_t row = blockIdx.x * 4 + threadIdx.x / 32;
  if (row >= p.N) {
    return;
  }
  w += w_offset(p, rhs, blockIdx.y) + row * Row<F>::size(p.K);
  x += x_offset(p, lhs, blockIdx.y);
  c += blockIdx.y * p.c_step;
  y += blockIdx.y * p.y_step;
  constexpr uint32_t most = 8;
  float sum[most] = {};
  uint32_t pieces = (p.K + 15) / 16;
  for (uint32_t piece = lane; piece < pieces; piece += 32) {
    float values[16];
    Row<F>::decode(w, piece, p.K, values);
    UNROLL
    for (uint32_t m = 0; m < most; ++m) {
      if (m < p.M) {
        const T* at = x + uint64_t(m) * p.K + 16 * piece;
        UNROLL
        for (uint32_t i = 0; i < 16; ++i) {
          if (16 * piece + i < p.K) {
            sum[m] = fmaf(values[i], widen(at[i]), sum[m]);
          }
        }
      }
    }
  }
  UNROLL
  for (uint32_t m = 0; m < most; ++m) {
    if (m < p.M) {
      UNROLL
      for (int step = 16; step > 0; step /= 2) {
        sum[m] += __shfl_xor_sync(~0u, sum[m], step);
      }
      if (lane == 0) {
        finish(p, c, y, uint64_t(m) * p.N + row, sum[m]);
      }
    }
  }
}
