// y = alpha * x W^T + beta * c for many rows of x on tensor cores, with
// products as exact as gemv's: the same units, for 64 columns at once.
//
// prepare() writes x as gemv holds it in shared memory, 64 columns a tile, once
// for the whole product; gemm's blocks have 8 tiles of 16 rows of w and copy
// one unit of a tile of x after another.
#pragma once
#include "gemv.h"

constexpr int gemm_columns = 64;
constexpr int gemm_tiles = gemm_columns / 8;

// Rows of x in a tile: f32 takes several columns each.
template <typename T>
struct GemmTile {
  static constexpr uint32_t rows = gemm_columns / Parts<T>::count;
};

// A warp a unit of a row. x is [M, K] for every entry of a batch, or the rows
// that lhs gives. Rows past M are zeros.
template <typename F, typename T>
__global__ void __launch_bounds__(256) prepare(
    const T* __restrict__ x, uint8_t* prepared, Params p, const uint32_t* lhs) {
  typedef Unit<F::summed> U;
  constexpr uint32_t rows = GemmTile<T>::rows;
  uint32_t lane = threadIdx.x % 32, units = (p.K + 255) / 256;
  uint32_t tiles = (p.M + rows - 1) / rows;
  uint64_t task = blockIdx.x * 8ull + threadIdx.x / 32;
  if (task >= uint64_t(units) * tiles * rows) {
    return;
  }
  uint32_t m = task % rows;
  uint32_t unit = task / rows % units, tile = task / rows / units;
  uint32_t row = tile * rows + m, at = 256 * unit + 8 * lane;
  Eight<T> eight = {};
  if (row < p.M && at < p.K) {
    uint64_t from = p.gather == 2
                        ? x_offset(p, lhs, row)
                        : x_offset(p, lhs, blockIdx.y) + uint64_t(row) * p.K;
    eight.load(x + from + at);
  }
  uint64_t index = (uint64_t(blockIdx.y) * tiles + tile) * units + unit;
  put_row<T, typename F::Layout, F::summed>(
      eight, prepared + index * gemm_columns * U::column_bytes, rows, m, lane);
}

// blockIdx: rows of w by 128, tiles of x, batch. With GATHER rows of x belong
// to w matrix rhs[m], which ascend: a block makes one product for every matrix
// that occurs among its rows.
template <typename F, typename T, bool GATHER>
__global__ void __launch_bounds__(256, 1) gemm(
    const uint8_t* __restrict__ w,
    const uint8_t* __restrict__ prepared,
    const T* c,
    T* y,
    Params p,
    const uint32_t* rhs) {
  typedef Unit<F::summed> U;
  typedef Ring<F::bytes, F::align, 2> Weights;
  constexpr uint32_t block_bytes = F::bytes / (256 / F::block);
  constexpr uint32_t rows = GemmTile<T>::rows;
  constexpr uint32_t unit_bytes = gemm_columns * U::column_bytes;
  extern __shared__ __align__(128) uint8_t memory[];
  uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t g = lane / 4, t = lane % 4;
  uint32_t row_bytes = p.K / F::block * block_bytes;
  uint32_t units = (p.K + 255) / 256;
  uint32_t row0 = blockIdx.x * 128 + warp * 16;
  uint32_t m0 = blockIdx.y * rows, end = min(m0 + rows, p.M);
  prepared +=
      (uint64_t(blockIdx.z) * gridDim.y + blockIdx.y) * units * unit_bytes;
  c += blockIdx.z * p.c_step;
  y += blockIdx.z * p.y_step;

  // x: two units, then the rings.
  Weights ring(memory + 2 * unit_bytes + warp * Weights::bytes, lane);
  Operand<gemm_tiles, F::summed, Parts<T>::scaled> operand(gemm_columns, g, t);
  for (uint32_t first = m0, last = end; first < end; first = last) {
    uint32_t matrix = GATHER                 ? rhs[first]
                      : p.gather || p.w_step ? matrix_of(p, rhs, blockIdx.z)
                                             : 0;
    for (last = GATHER ? first + 1 : end; last < end && rhs[last] == matrix;) {
      ++last;
    }
    const uint8_t* base = w + min(matrix, p.last_w) * p.w_step;
    auto row_of = [&](uint32_t i) {
      return base + uint64_t(min(row0 + i, p.N - 1)) * row_bytes;
    };
    auto fill = [&](uint32_t unit) {
      uint32_t at = unit * F::bytes;
      if (unit < units) {
        ring.fill(
            row_of(lane % 16) + at, min(uint32_t(F::bytes), row_bytes - at));
        const uint4* from =
            (const uint4*)(prepared + uint64_t(unit) * unit_bytes);
        uint32_t to = shared_address(memory + unit % 2 * unit_bytes);
        for (uint32_t i = threadIdx.x; i < unit_bytes / 16; i += 256) {
          asm volatile(
              "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + 16 * i),
              "l"(from + i)
              : "memory");
        }
      } else {
        ring.skip();
      }
      asm volatile("cp.async.commit_group;" ::: "memory");
    };
    __syncthreads(); // the last product may still be reading
    fill(0);
    fill(1);
    Sums<gemm_tiles> total;
    for (uint32_t unit = 0; unit < units; ++unit) {
      const uint8_t* stage = ring.take();
      asm volatile("cp.async.wait_group 1;" ::: "memory");
      __syncthreads();
      uint32_t at = unit * F::bytes;
      operand.unit = memory + unit % 2 * unit_bytes;
      int blocks = (p.K - 256 * unit) / F::block;
      F::unit(
          Weights::row(stage, g, row_of(g) + at),
          Weights::row(stage, g + 8, row_of(g + 8) + at),
          blocks,
          operand,
          total);
      __syncthreads();
      fill(unit + 2);
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    // f32 has its parts in columns a third of the tile apart: by way of memory.
    __syncthreads();
    constexpr int row_floats = gemm_columns + 2;
    float* sums = (float*)memory + warp * 16 * row_floats;
    UNROLL
    for (int i = 0; i < gemm_tiles; ++i) {
      float* to = sums + g * row_floats + 8 * i + 2 * t;
      to[0] = total.v[i][0];
      to[1] = total.v[i][1];
      to[8 * row_floats] = total.v[i][2];
      to[8 * row_floats + 1] = total.v[i][3];
    }
    __syncwarp();
    for (uint32_t i = lane; i < 16 * rows; i += 32) {
      uint32_t row = row0 + i % 16, m = m0 + i / 16;
      if (row < p.N && m >= first && m < last) {
        float sum = 0.0f;
        UNROLL
        for (int part = 0; part < Parts<T>::count; ++part) {
          sum += sums[i % 16 * row_floats + part * rows + i / 16];
        }
        finish(p, c, y, uint64_t(m) * p.N + row, sum);
      }
    }
  }
}
