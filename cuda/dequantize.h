// y[M, K] = rows of w as plain numbers: a thread a piece of 16.
#pragma once
#include "rows.h"

template <typename F, typename T>
__global__ void __launch_bounds__(128)
    dequantize(const uint8_t* __restrict__ w, T* y, Params p) {
  uint64_t pieces = (p.K + 15) / 16;
  uint64_t i = blockIdx.x * 128ull + threadIdx.x;
  if (i >= pieces * p.M) {
    return;
  }
  uint32_t row = uint32_t(i / pieces), piece = uint32_t(i % pieces);
  float values[16];
  Row<F>::decode(w + row * Row<F>::size(p.K), piece, p.K, values);
  y += uint64_t(row) * p.K + 16 * piece;
  UNROLL
  for (uint32_t j = 0; j < 16; ++j) {
    if (16 * piece + j < p.K) {
      y[j] = narrow<T>(values[j]);
    }
  }
}
