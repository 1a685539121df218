// y = alpha * x W^T + beta * c for 1 to 8 rows of x, one kernel for all of
// them: rows of x are columns of the tensor cores' B operand, which has 8 for
// the price of one, and a row's sums do not depend on the others.
//
// A block has p.tiles tiles of 16 rows of w. The warps of a tile take turns
// along K, COPY units of 256 weights at a time, and their sums are added in
// their order. x is prepared once a block, p.held units of it at a time.
#pragma once
#include "tc/grouped.h"
#include "tc/kquants.h"
#include "tc/q45_k.h"
#include "tc/ring.h"
#include "tc/tables.h"

template <typename F, typename T, int TILES, int COPY, int STAGES>
__global__ void gemv(
    const uint8_t* __restrict__ w,
    const T* __restrict__ x,
    const T* c,
    T* y,
    Params p,
    const uint32_t* lhs,
    const uint32_t* rhs) {
  typedef Unit<F::summed> U;
  typedef Ring<COPY * F::bytes, F::align, STAGES> Weights;
  constexpr uint32_t block_bytes = F::bytes / (256 / F::block);
  extern __shared__ __align__(128) uint8_t memory[];
  uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t warps = blockDim.x / 32;
  uint32_t tile = warp % p.tiles, turn = warp / p.tiles,
           turns = warps / p.tiles;
  uint32_t g = lane / 4, t = lane % 4;

  // The host counts on this order and these sizes: x, then the rings.
  uint32_t unit_bytes = U::bytes(p.columns);
  uint8_t* held = memory;
  uint8_t* rings = memory + ((p.held * unit_bytes + 127) & ~127u);
  Weights ring(rings + warp * Weights::bytes, lane);

  uint32_t row_bytes = p.K / F::block * block_bytes;
  uint32_t units = (p.K + 255) / 256;
  uint32_t row0 = (blockIdx.x * p.tiles + tile) * 16;
  w += w_offset(p, rhs, blockIdx.y);
  x += x_offset(p, lhs, blockIdx.y);
  // Past the end of w the last row stands in.
  auto row_of = [&](uint32_t i) {
    return w + uint64_t(min(row0 + i, p.N - 1)) * row_bytes;
  };
  const uint8_t* copied = row_of(lane % 16);
  const uint8_t* first = row_of(g);
  const uint8_t* second = row_of(g + 8);

  uint32_t next = turn * COPY; // unit to copy
  auto fill = [&] {
    if (next < units) {
      uint32_t at = next * F::bytes;
      ring.fill(copied + at, min(COPY * uint32_t(F::bytes), row_bytes - at));
    } else {
      ring.skip();
    }
    next += turns * COPY;
  };
  UNROLL
  for (int i = 0; i < STAGES; ++i) {
    fill();
  }

  Sums<TILES> total;
  Operand<TILES, F::summed, Parts<T>::scaled> operand(p.columns, g, t);
  uint32_t unit = turn * COPY; // to multiply
  for (uint32_t start = 0; start < units; start += p.held) {
    uint32_t count = min(p.held, units - start);
    if (start != 0) {
      __syncthreads();
    }
    Columns<T, typename F::Layout, F::summed, 4>(
        x, 256 * start, count, p, warp, warps)
        .put(held);
    __syncthreads();
    for (; unit < start + count; unit += turns * COPY) {
      const uint8_t* stage = ring.take();
      uint32_t at = unit * F::bytes;
      const uint8_t* r0 = Weights::row(stage, g, first + at);
      const uint8_t* r1 = Weights::row(stage, g + 8, second + at);
      UNROLL
      for (int i = 0; i < COPY; ++i) {
        if (unit + i < units) {
          operand.unit = held + (unit + i - start) * unit_bytes;
          int blocks = (p.K - 256 * (unit + i)) / F::block;
          F::unit(r0 + i * F::bytes, r1 + i * F::bytes, blocks, operand, total);
        }
      }
      __syncwarp();
      fill();
    }
  }

  // Sums by warp, row and column in the place of x.
  __syncthreads();
  constexpr int row_floats =
      8 * TILES + 2; // rows of a store on different banks
  float* sums = (float*)memory + warp * 16 * row_floats;
  UNROLL
  for (int i = 0; i < TILES; ++i) {
    float* at = sums + g * row_floats + 8 * i + 2 * t;
    at[0] = total.v[i][0];
    at[1] = total.v[i][1];
    at[8 * row_floats] = total.v[i][2];
    at[8 * row_floats + 1] = total.v[i][3];
  }
  __syncthreads();
  c += blockIdx.y * p.c_step;
  y += blockIdx.y * p.y_step;
  for (uint32_t i = threadIdx.x; i < 16 * p.tiles * p.M; i += blockDim.x) {
    uint32_t r = i % (16 * p.tiles), m = i / (16 * p.tiles);
    uint32_t row = blockIdx.x * p.tiles * 16 + r;
    if (row < p.N) {
      const float* from =
          (const float*)memory + (r / 16 * 16 + r % 16) * row_floats + m;
      float sum = 0.0f;
      for (uint32_t k = 0; k < turns; ++k) {
        const float* mine = from + k * p.tiles * 16 * row_floats;
        UNROLL
        for (int part = 0; part < Parts<T>::count; ++part) {
          sum += mine[part * p.M];
        }
      }
      finish(p, c, y, uint64_t(m) * p.N + row, sum);
    }
  }
}
