// y[M, K] = rows of w as plain numbers. With `gather`, row i is rhs[i] of w:
// the rows of an embedding.
#pragma once
#include "rows.h"

template <typename F, typename T>
[[kernel]] [[max_total_threads_per_threadgroup(64)]] void dequantize(
    device const uchar* w [[buffer(0)]],
    device T* y [[buffer(3)]],
    constant Params& p [[buffer(4)]],
    device const uint* rhs [[buffer(6)]],
    uint3 thread_at [[thread_position_in_grid]]) {
  uint piece = thread_at.x, row = thread_at.y;
  if (16 * piece >= p.K || row >= p.M) {
    return;
  }
  ulong from = p.gather ? rhs[row] : row;
  float values[16];
  Row<F>::decode(w + from * Row<F>::size(p.K), piece, p.K, values);
  ushort count = min(p.K - 16 * piece, 16u);
  y += ulong(row) * p.K + 16 * piece;
  for (ushort i = 0; i < count; ++i) {
    y[i] = T(values[i]);
  }
}
