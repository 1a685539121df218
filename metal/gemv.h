// y = alpha * x W^T + beta * c for few rows of x: gemv (COLUMNS 1) and
// gemv_batch, which are one kernel so that a row of a batch is computed as it
// would be alone, and every weight is loaded once for all of them.
//
// A simdgroup has ROWS rows of w and walks along K, 32 / Dot::lanes units at a
// time. Its lanes are 32 / Dot::lanes cohorts with one unit each. With SPLIT
// all simdgroups of a threadgroup share the same rows and take turns along K.
#pragma once
#include "dots/block.h"
#include "dots/kquant_codes.h"
#include "dots/nibble_codes.h"
#include "dots/signed_codes.h"
#include "dots/table.h"

constant constexpr ushort max_simdgroups = 4;

template <typename Dot, typename T, ushort ROWS, ushort COLUMNS, bool SPLIT>
[[kernel]] [[max_total_threads_per_threadgroup(128)]] void gemv(
    device const uchar* w [[buffer(0)]],
    device const T* x [[buffer(1)]],
    device const T* c [[buffer(2)]],
    device T* y [[buffer(3)]],
    constant Params& p [[buffer(4)]],
    device const uint* lhs [[buffer(5)]],
    device const uint* rhs [[buffer(6)]],
    uint3 group [[threadgroup_position_in_grid]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort simdgroups [[simdgroups_per_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float table[Dot::table_size ? Dot::table_size : 1];
  threadgroup float partial[SPLIT ? max_simdgroups * ROWS * COLUMNS : 1];
  if (Dot::table_size) {
    Dot::fill(table, 32 * simdgroup + lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  // 64-bit offsets are the threadgroup's; within it 32 bits are enough.
  uint group_row = group.x * (SPLIT ? ROWS : ROWS * simdgroups);
  uint first_row = group_row + (SPLIT ? 0 : ROWS * simdgroup);
  uint first_column = group.y * COLUMNS;
  uint stride = Dot::stride(p.K);
  device const typename Dot::Element* base =
      (device const typename Dot::Element*)(w + w_offset(p, rhs, group.z)) +
      ulong(group_row) * stride;
  x += x_offset(p, lhs, group.z) + ulong(first_column) * p.K;

  uint row[ROWS]; // past the end of w the last row stands in
  UNROLL
  for (ushort r = 0; r < ROWS; ++r) {
    row[r] = (min(first_row + r, p.N - 1) - group_row) * stride;
  }
  ushort columns = min(p.M - first_column, uint(COLUMNS));

  float sum[ROWS][COLUMNS];
  UNROLL
  for (ushort r = 0; r < ROWS; ++r) {
    UNROLL
    for (ushort m = 0; m < COLUMNS; ++m) {
      sum[r][m] = 0.0f;
    }
  }
  uint cohort = lane / Dot::lanes, it = lane % Dot::lanes;
  uint cohorts = 32 / Dot::lanes;
  uint units = (p.K + Dot::unit - 1) / Dot::unit;
  uint first = SPLIT ? cohort + cohorts * simdgroup : cohort;
  uint step = SPLIT ? cohorts * simdgroups : cohorts;
  for (uint u = first; u < units; u += step) {
    uint at = u * Dot::unit;
    typename Dot::Weights weights[ROWS];
    UNROLL
    for (ushort r = 0; r < ROWS; ++r) {
      Dot::load(base, row[r], u, it, p.K - at, table, weights[r]);
    }
    UNROLL
    for (ushort m = 0; m < COLUMNS; ++m) {
      if (COLUMNS == 1 || m < columns) {
        typename Dot::template Acts<T> acts;
        Dot::load_x(x, m * p.K + at, it, p.K - at, acts);
        UNROLL
        for (ushort r = 0; r < ROWS; ++r) {
          sum[r][m] = Dot::template dot<T>(weights[r], acts, sum[r][m]);
        }
      }
    }
  }

  ulong c_base = group.z * ulong(p.c_step);
  ulong y_base = group.z * ulong(p.y_step);
  UNROLL
  for (ushort r = 0; r < ROWS; ++r) {
    UNROLL
    for (ushort m = 0; m < COLUMNS; ++m) {
      float total = simd_sum(sum[r][m]);
      if (SPLIT) {
        if (lane == 0) {
          partial[(simdgroup * ROWS + r) * COLUMNS + m] = total;
        }
      } else if (lane == 0 && first_row + r < p.N && m < columns) {
        ulong i = ulong(first_column + m) * p.N + first_row + r;
        finish(p, c + c_base, y + y_base, i, total);
      }
    }
  }
  if (SPLIT) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint i = 32 * simdgroup + lane;
    uint r = i / COLUMNS, m = i % COLUMNS;
    if (r < ROWS && first_row + r < p.N && m < columns) {
      float total = partial[i];
      for (ushort s = 1; s < simdgroups; ++s) {
        total += partial[s * ROWS * COLUMNS + i];
      }
      ulong at = ulong(first_column + m) * p.N + first_row + r;
      finish(p, c + c_base, y + y_base, at, total);
    }
  }
}
