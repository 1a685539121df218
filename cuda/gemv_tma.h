// gemv for compute capability 9.0 and later: the same sums, with the tensor
// copy engine bringing w. The grid is one block a multiprocessor, so that x is
// prepared once each and rows are spread evenly; a cluster of blocks shares
// rows and splits K between them, which also splits the work on x.
//
// The grid is blocks of a cluster by clusters by batch entries. The threads of
// a block are 32 by groups by turns: a group takes its share of the tiles of 16
// rows, and its warps take turns along K, COPY units of 256 weights at a time.
// AHEAD is how much of x a warp loads before w's bytes queue up in front of it.
// Every warp's sums go to the block that owns their rows, which adds them in
// the order of K's split.
#pragma once
#include "gemv.h"
#include "tc/tma.h"

#if __CUDA_ARCH__ >= 900

template <
    typename F,
    typename T,
    int COPY,
    int INTERLEAVE,
    int CLUSTER,
    int AHEAD>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(512, 1)
    gemv_tma(
        const __grid_constant__ TensorMap w,
        const T* __restrict__ x,
        const T* c,
        T* y,
        Params p,
        const uint32_t* lhs,
        const uint32_t* rhs) {
  typedef Unit<F::summed> U;
  typedef TmaRing<F, COPY, INTERLEAVE> Weights;
  extern __shared__ __align__(1024) uint8_t memory[];
  uint32_t lane = threadIdx.x, group = threadIdx.y, turns = blockDim.z;
  uint32_t warp = threadIdx.z * blockDim.y + group;
  uint32_t turn = threadIdx.z * COPY;
  uint32_t g = lane / 4, t = lane % 4;
  uint32_t rank = blockIdx.x;
  constexpr uint32_t cluster = CLUSTER;
  uint32_t warps = blockDim.y * turns;

  // The host counts on this order and these sizes: rings, x, sums, barriers.
  uint32_t unit_bytes = U::bytes(p.columns);
  uint8_t* held = memory + warps * p.stages * Weights::stage_bytes;
  float* sums = (float*)(held + p.held * unit_bytes);
  uint32_t owned = p.owned, parts = cluster * turns;
  uint8_t* barriers = (uint8_t*)(sums + (parts * owned * p.M + 3 & ~3u));

  uint32_t row0 = blockIdx.y * p.rows;
  uint32_t rows = min(p.rows, p.N - row0);
  uint32_t tiles = (rows + 15) / 16;
  uint32_t units = (p.K + 255) / 256;
  uint32_t unit0 = rank * p.held;
  uint32_t count = unit0 < units ? min(p.held, units - unit0) : 0;

  x += x_offset(p, lhs, blockIdx.z);
  Columns<T, typename F::Layout, F::summed, AHEAD> columns(
      x, 256 * unit0, count, p, warp, warps);
  uint32_t row_bytes = p.K / F::block * (F::bytes / (256 / F::block));
  Weights ring(memory, barriers, p.stages, warp, lane, row_bytes);
  uint32_t matrix = p.gather || p.w_step ? matrix_of(p, rhs, blockIdx.z) : 0;
  uint32_t next_tile = turn < count ? group : tiles, next_unit = turn;
  auto fill = [&] {
    if (next_tile < tiles) {
      uint32_t row = 16 * next_tile;
      ring.fill(w, unit0 + next_unit, row0 + row, rows - row, matrix);
      next_unit += turns * COPY;
      if (next_unit >= count) {
        next_unit = turn;
        next_tile += blockDim.y;
      }
    }
  };
  for (uint32_t i = 0; i < p.stages; ++i) {
    fill();
  }
  if (cluster > 1) {
    cluster_start();
  }
  columns.put(held);
  __syncthreads();
  if (cluster > 1) {
    cluster_wait(); // all blocks are there to be written to
  }
  c += blockIdx.z * p.c_step;
  y += blockIdx.z * p.y_step;

  Operand<1, F::summed, Parts<T>::scaled> operand(p.columns, g, t);
  for (uint32_t tile = group; tile < tiles; tile += blockDim.y) {
    Sums<1> total;
    for (uint32_t unit = turn; unit < count; unit += turns * COPY) {
      const uint8_t* r0 = ring.take() + ring.row(g, unit0 + unit);
      UNROLL
      for (int i = 0; i < COPY; ++i) {
        if (COPY == 1 || unit + i < count) {
          operand.unit = held + (unit + i) * unit_bytes;
          int blocks = (p.K - 256 * (unit0 + unit + i)) / F::block;
          const uint8_t* r = r0 + i * F::bytes;
          F::unit(r, r + Weights::eight_bytes, blocks, operand, total);
        }
      }
      __syncwarp();
      fill();
    }
    UNROLL
    for (int i = 0; i < 4; ++i) {
      uint32_t row = 16 * tile + 8 * (i / 2) + Weights::number(g);
      uint32_t m = 2 * t + i % 2;
      if (row < rows && m < p.M) {
        if (parts == 1) {
          finish(p, c, y, uint64_t(m) * p.N + row0 + row, total.v[0][i]);
        } else {
          uint32_t part = rank * turns + threadIdx.z;
          uint32_t owner = cluster == 1 ? 0 : row / owned;
          uint32_t at = (part * owned + row - owner * owned) * p.M + m;
          put_remote(sums + at, owner, cluster, total.v[0][i]);
        }
      }
    }
  }
  if (parts == 1) {
    return;
  }
  if (cluster > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
  for (uint32_t i = 32 * warp + lane; i < owned * p.M; i += 32 * warps) {
    uint32_t r = quotient(i, p.inverse), m = i - r * p.M,
             row = rank * owned + r;
    if (row < rows) {
      float sum = 0.0f;
      for (uint32_t part = 0; part < parts; ++part) {
        sum += sums[(part * owned + r) * p.M + m];
      }
      finish(p, c, y, uint64_t(m) * p.N + row0 + row, sum);
    }
  }
}

#endif
