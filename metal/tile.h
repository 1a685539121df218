// The product of one tile by a threadgroup of 4 simdgroups: BM rows of x by BN
// columns, 32 of the summed axis at a time. x and the decoded weights are
// staged as f32, so that nothing is rounded on the way.
#pragma once
#include "rows.h"

constant constexpr ushort tile_threads = 128;
constant constexpr ushort tile_depth = 32;
// Keeps the rows of a staged tile in different banks.
constant constexpr ushort tile_pad = 4;

// With TRANSPOSE (x W^T) the sum is over K and a tile of w is BN rows by 32
// weights; without (x W) it is over N, and a tile is 32 rows by BN weights.
template <typename F, typename T, ushort BM, ushort BN, bool TRANSPOSE>
struct Tile {
  static constant constexpr ushort x_pitch = tile_depth + tile_pad;
  static constant constexpr ushort w_rows = TRANSPOSE ? BN : tile_depth;
  static constant constexpr ushort w_pieces =
      (TRANSPOSE ? tile_depth : BN) / 16;
  static constant constexpr ushort w_pitch = 16 * w_pieces + tile_pad;
  static constant constexpr ushort staged = BM * x_pitch + w_rows * w_pitch;
  // The finished tile, BM by BN, takes the place of the staged ones.
  static constant constexpr ushort floats = staged > BM* BN ? staged : BM * BN;

  // Every thread has a part of one row of the x tile, row thread / x_share.
  static constant constexpr ushort x_share = tile_threads / BM;

  static void load_x(
      device const T* x_row,
      uint from,
      uint depth,
      uint thread_index,
      threadgroup float* out) {
    constexpr ushort count = tile_depth / x_share;
    uint j = thread_index % x_share * count;
    out += thread_index / x_share * x_pitch + j;
    for (ushort e = 0; e < count; ++e) {
      uint k = from + j + e;
      out[e] = k < depth ? float(x_row[k]) : 0.0f;
    }
  }

  // Columns past the end repeat the last one or are zero, and are not stored.
  // Along the summed axis what is past the end must be zero.
  static void load_w(
      device const uchar* w,
      constant Params& p,
      uint from,
      uint column,
      uint thread_index,
      threadgroup float* out) {
    for (uint i = thread_index; i < w_rows * w_pieces; i += tile_threads) {
      uint r = i / w_pieces, piece = i % w_pieces;
      uint n = TRANSPOSE ? min(column + r, p.N - 1) : from + r;
      uint at = (TRANSPOSE ? from : column) / 16 + piece;
      float values[16];
      if (n < p.N && 16 * at < p.K) {
        Row<F>::decode(w + n * Row<F>::size(p.K), at, p.K, values);
      } else {
        UNROLL
        for (ushort e = 0; e < 16; ++e) {
          values[e] = 0.0f;
        }
      }
      UNROLL
      for (ushort e = 0; e < 16; ++e) {
        out[r * w_pitch + 16 * piece + e] = values[e];
      }
    }
  }

  // Leaves the product of the tile in stage, row after row.
  static void multiply(
      device const uchar* w,
      device const T* x_row,
      constant Params& p,
      uint column,
      uint thread_index,
      uint simdgroup,
      threadgroup float* stage) {
    constexpr ushort FM = BM / 16, FN = BN / 16;
    uint depth = TRANSPOSE ? p.K : p.N;
    uint m0 = simdgroup / 2 * (BM / 2), n0 = simdgroup % 2 * (BN / 2);
    threadgroup float* xs = stage;
    threadgroup float* ws = stage + BM * x_pitch;

    simdgroup_float8x8 sum[FM][FN];
    UNROLL
    for (ushort i = 0; i < FM; ++i) {
      UNROLL
      for (ushort j = 0; j < FN; ++j) {
        sum[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      }
    }
    for (uint from = 0; from < depth; from += tile_depth) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      load_x(x_row, from, depth, thread_index, xs);
      load_w(w, p, from, column, thread_index, ws);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      UNROLL
      for (ushort k = 0; k < tile_depth; k += 8) {
        simdgroup_float8x8 a[FM], b[FN];
        UNROLL
        for (ushort i = 0; i < FM; ++i) {
          simdgroup_load(a[i], xs + (m0 + 8 * i) * x_pitch + k, x_pitch);
        }
        UNROLL
        for (ushort j = 0; j < FN; ++j) {
          uint n = n0 + 8 * j;
          uint at = TRANSPOSE ? n * w_pitch + k : k * w_pitch + n;
          simdgroup_load(b[j], ws + at, w_pitch, ulong2(0, 0), TRANSPOSE);
        }
        UNROLL
        for (ushort i = 0; i < FM; ++i) {
          UNROLL
          for (ushort j = 0; j < FN; ++j) {
            simdgroup_multiply_accumulate(sum[i][j], a[i], b[j], sum[i][j]);
          }
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL
    for (ushort i = 0; i < FM; ++i) {
      UNROLL
      for (ushort j = 0; j < FN; ++j) {
        uint at = (m0 + 8 * i) * BN + n0 + 8 * j;
        simdgroup_store(sum[i][j], stage + at, BN);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  // Writes rows `first` to `last` - 1 of the tile that starts at row m0.
  static void store(
      constant Params& p,
      device const T* c,
      device T* y,
      uint m0,
      uint first,
      uint last,
      uint column,
      uint thread_index,
      threadgroup const float* stage) {
    uint columns = TRANSPOSE ? p.N : p.K;
    for (uint i = thread_index; i < BM * BN; i += tile_threads) {
      uint m = m0 + i / BN, n = column + i % BN;
      if (m >= first && m < last && n < columns) {
        finish(p, c, y, ulong(m) * columns + n, stage[i]);
      }
    }
  }
};
