// Matrix products for many rows of x: y = alpha * x W^T + beta * c, or x W
// without TRANSPOSE. Batches and experts as in gemv.
#pragma once
#include "tile.h"

template <typename F, typename T, ushort BM, ushort BN, bool TRANSPOSE>
[[kernel]] [[max_total_threads_per_threadgroup(128)]] void gemm(
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
  uint depth = TRANSPOSE ? p.K : p.N;
  x += x_offset(p, lhs, group.z) + ulong(m) * depth;
  w += w_offset(p, rhs, group.z);
  Work::multiply(w, x, p, column, thread_index, simdgroup, stage);
  c += group.z * ulong(p.c_step);
  y += group.z * ulong(p.y_step);
  Work::store(p, c, y, m0, m0, p.M, column, thread_index, stage);
}
