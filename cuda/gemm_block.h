// Products with many rows of x in f32 arithmetic, of any type: y = alpha * x
// W^T
// + beta * c, or x W without TRANSPOSE. With GATHER rows of x are pairs, row m
// with x matrix lhs[m] (of one row) and w matrix rhs[m], which ascend: a block
// makes one product for every matrix that occurs among its rows.
#pragma once
#include "rows.h"

constexpr int tile_size = 64;  // rows of x, and columns of y
constexpr int tile_depth = 16; // one piece of w

template <typename F, typename T, bool TRANSPOSE>
struct BlockTile {
  // Padded, so that the threads that fill a column are on different banks.
  float x[tile_depth][tile_size + 1];
  float w[tile_depth][tile_size + 1];

  // x of rows m0 ... at depths k0 ...; `row` gives where a row starts.
  template <typename RowOf>
  DEVICE void load_x(
      RowOf row, uint32_t m0, uint32_t end, uint32_t k0, uint32_t depth) {
    for (uint32_t i = threadIdx.x; i < tile_size * tile_depth; i += 256) {
      uint32_t m = i / tile_depth, k = i % tile_depth;
      bool in = m0 + m < end && k0 + k < depth;
      x[k][m] = in ? widen(row(m0 + m)[k0 + k]) : 0.0f;
    }
  }
  // W^T: depth is along K, columns are rows of w. W: the other way round.
  DEVICE void load_w(
      const uint8_t* matrix, const Params& p, uint32_t n0, uint32_t k0) {
    uint64_t size = Row<F>::size(p.K);
    if (threadIdx.x < 64) {
      uint32_t i = threadIdx.x;
      float values[16];
      uint32_t row = TRANSPOSE ? n0 + i : k0 + i / 4;
      uint32_t piece = TRANSPOSE ? k0 / 16 : n0 / 16 + i % 4;
      bool in = row < p.N && 16 * piece < p.K;
      if (in) {
        Row<F>::decode(matrix + row * size, piece, p.K, values);
      }
      UNROLL
      for (uint32_t j = 0; j < 16; ++j) {
        float value = in ? values[j] : 0.0f;
        if (TRANSPOSE) {
          w[j][i] = value;
        } else {
          w[i / 4][i % 4 * 16 + j] = value;
        }
      }
    }
  }
};

template <typename F, typename T, bool TRANSPOSE, bool GATHER>
__global__ void __launch_bounds__(256) gemm_block(
    const uint8_t* __restrict__ w,
    const T* __restrict__ x,
    const T* c,
    T* y,
    Params p,
    const uint32_t* lhs,
    const uint32_t* rhs) {
  __shared__ BlockTile<F, T, TRANSPOSE> tile;
  uint32_t depth = TRANSPOSE ? p.K : p.N, width = TRANSPOSE ? p.N : p.K;
  uint32_t n0 = blockIdx.x * tile_size, m0 = blockIdx.y * tile_size;
  uint32_t end = min(m0 + tile_size, p.M);
  if (!GATHER) {
    w += w_offset(p, rhs, blockIdx.z);
    x += x_offset(p, lhs, blockIdx.z);
  }
  c += blockIdx.z * p.c_step;
  y += blockIdx.z * p.y_step;
  auto row_of = [&](uint32_t m) {
    return x + (GATHER ? x_offset(p, lhs, m) : uint64_t(m) * depth);
  };
  uint32_t tn = threadIdx.x % 16, tm = threadIdx.x / 16;
  for (uint32_t first = m0, last = end; first < end; first = last) {
    const uint8_t* matrix = w;
    last = end;
    if (GATHER) {
      uint32_t expert = rhs[first];
      matrix += min(expert, p.last_w) * p.w_step;
      for (last = first + 1; last < end && rhs[last] == expert;) {
        ++last;
      }
    }
    float sum[4][4] = {};
    for (uint32_t k0 = 0; k0 < depth; k0 += tile_depth) {
      tile.load_x(row_of, m0, end, k0, depth);
      tile.load_w(matrix, p, n0, k0);
      __syncthreads();
      UNROLL
      for (int k = 0; k < tile_depth; ++k) {
        UNROLL
        for (int i = 0; i < 4; ++i) {
          UNROLL
          for (int j = 0; j < 4; ++j) {
            sum[i][j] =
                fmaf(tile.x[k][tm + 16 * i], tile.w[k][tn + 16 * j], sum[i][j]);
          }
        }
      }
      __syncthreads();
    }
    UNROLL
    for (int i = 0; i < 4; ++i) {
      uint32_t m = m0 + tm + 16 * i;
      UNROLL
      for (int j = 0; j < 4; ++j) {
        uint32_t n = n0 + tn + 16 * j;
        if (m >= first && m < last && n < width) {
          finish(p, c, y, uint64_t(m) * width + n, sum[i][j]);
        }
      }
    }
  }
}
