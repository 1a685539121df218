// Prefill of experts: row m of y is row lhs[m] of x times matrix rhs[m] of w,
// with rhs sorted. A threadgroup has BM consecutive rows and makes one product
// for each expert that occurs among them. (Decode and unsorted indices go
// through gemv and gemm, with one batch entry a pair.)
#pragma once
#include "tile.h"

template <typename F, typename T, ushort BM, ushort BN, bool TRANSPOSE>
[[kernel]] [[max_total_threads_per_threadgroup(128)]] void gather_gemm(
    device const uchar* w [[buffer(0)]],
    device const T* x [[buffer(1)]],
    device const T* c [[buffer(2)]],
    device T* y [[buffer(3)]],
    constant Params& p [[buffer(4)]],
    device const uint* lhs [[buffer(5)]],
    device const uint* rhs [[buffer(6)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  typedef Tile<F, T, BM, BN, TRANSPOSE> Work;
  threadgroup float stage[Work::floats];

  uint column = group.x * BN, m0 = group.y * BM;
  uint m = min(m0 + thread_index / Work::x_share, p.M - 1);
  uint end = min(m0 + BM, p.M);
  x += ulong(lhs[m]) * p.x_step;
  for (uint first = m0; first < end;) {
    uint expert = rhs[first], last = first + 1;
    while (last < end && rhs[last] == expert) {
      ++last;
    }
    device const uchar* matrix = w + expert * ulong(p.w_step);
    Work::multiply(matrix, x, p, column, thread_index, simdgroup, stage);
    Work::store(p, c, y, m0, first, last, column, thread_index, stage);
    first = last;
  }
}
