// gemv for compute capability 9.0 and later, with the tensor copy engine
// bringing w. The grid is blocks of a cluster by clusters by batch entries, one
// block a multiprocessor. K is in parts, ranks, of blocks of a cluster, which
// share rows and split the work on x, or of the warps of a lone block. WHOLE
// multiplies in whole numbers, for types that have a WholeUnit, otherwise it is
// done as in gemv.
//
// A rank's work is tiles of 16 rows by pairs of units of 256 weights, tile by
// tile; its warps have an equal stretch of that each. A tile's sums are added
// in the order of their ranks and warps, in the block that owns the tile.
// Stretches are those of `split` rows, whatever a cluster has (a multiple of
// it), so that sums have one order for all batches; that a cluster of two has
// twice a lone block's rows and each rank twice its warps is the same order.
#pragma once
#include "gemv.h"
#include "tc/staged.h"
#include "tc/stretch.h"
#include "tc/tma.h"
#include "tc/whole_blocks.h"

#if __CUDA_ARCH__ >= 900

// How a type's units are multiplied: in f16, a row of x in a column.
template <typename F, typename T, int ROWS, bool WHOLE>
struct Way {
  typedef HalfTask<T, typename F::Layout, F::summed> Task;
  typedef F Unit;
  static constexpr int tiles = 1;
  static constexpr bool wide = F::align == 16;
  static constexpr uint32_t zero_bytes = 0;
  struct Operand : ::Operand<1, F::summed, Parts<T>::scaled> {
    DEVICE Operand(uint32_t M, uint32_t g, uint32_t t)
        : ::Operand<1, F::summed, Parts<T>::scaled>(M, g, t) {}
  };
  // Calls put(half, m, sum) for rows g (half 0) and g + 8 of a warp's sums.
  template <typename Put>
  DEVICE static void each(
      const Sums<1>& sums, uint32_t t, uint32_t M, const Put& put) {
    UNROLL
    for (int i = 0; i < 4; ++i) {
      uint32_t m = 2 * t + i % 2;
      if (m < M) {
        put(i / 2, m, sums.v[0][i]);
      }
    }
  }
};

// In whole numbers: three digits of a row of x. Units that can do so take their
// groups in pairs for one row.
template <typename U, int TILES, bool PAIRED>
struct WholeView {
  typedef typename U::Layout Layout;
  typedef WholeOperand<TILES> Operand;
};
template <typename U>
struct WholeView<U, 1, true> {
  typedef typename U::PairLayout Layout;
  typedef PairOperand<U> Operand;
};

template <typename F, typename T, int ROWS>
struct Way<F, T, ROWS, true> {
  typedef WholeUnit<F> Unit;
  static constexpr int tiles = ROWS <= 2 ? 1 : Digits<WholeEights>::count;
  static constexpr bool paired = Unit::paired && ROWS == 1;
  static constexpr bool wide = paired || F::align == 16;
  static constexpr uint32_t zero_bytes = paired ? 256 : 0;
  typedef WholeView<Unit, tiles, paired> View;
  typedef WholeTask<T, typename View::Layout, F::summed != 0> Task;
  typedef typename View::Operand Operand;
  DEVICE static float number(float low, float middle, float high) {
    return fmaf(65536.0f, high, fmaf(256.0f, middle, low));
  }
  template <typename Put>
  DEVICE static void each(
      const Sums<tiles>& sums, uint32_t t, uint32_t M, const Put& put) {
    if constexpr (tiles > 1) {
      UNROLL
      for (int c = 0; c < 4; ++c) {
        uint32_t m = 2 * t + c % 2;
        if (m < M) {
          put(c / 2, m, number(sums.v[0][c], sums.v[1][c], sums.v[2][c]));
        }
      }
      return;
    }
    UNROLL
    for (int half = 0; half < (paired ? 1 : 2); ++half) {
      const float* mine = sums.v[0] + 2 * half;
      float high = __shfl_xor_sync(~0u, mine[0], 1);
      if (t % 2 != 0) {
        continue;
      }
      float sum = number(mine[0], mine[1], high);
      if (paired) {
        put(t / 2, 0, sum);
      } else if (t / 2 < M) {
        put(half, t / 2, sum);
      }
    }
  }
};

// ROWS: for so many rows of x at most, 1, 8 or, in whole numbers, 2.
template <
    typename F,
    typename T,
    int COPY,
    int INTERLEAVE,
    int CLUSTER,
    int ROWS,
    bool WHOLE>
__global__ void __cluster_dims__(CLUSTER, 1, 1)
    __launch_bounds__(32 * gemv_warps, 1) gemv_tma(
        const __grid_constant__ TensorMap w,
        const T* __restrict__ x,
        const T* c,
        T* y,
        Params p,
        const uint32_t* lhs,
        const uint32_t* rhs) {
  typedef Way<F, T, ROWS, WHOLE> Way;
  typedef TmaRing<F, COPY, INTERLEAVE, Way::wide> Weights;
  extern __shared__ __align__(1024) uint8_t memory[];
  uint32_t lane = threadIdx.x, warp = threadIdx.y;
  uint32_t g = lane / 4, t = lane % 4;
  // Parts of K and the warps of each.
  uint32_t ranks = CLUSTER == 1 ? p.ranks : CLUSTER;
  bool halves = CLUSTER == 1 && ranks == 2;
  uint32_t warps = halves ? gemv_warps / 2 : gemv_warps;
  uint32_t rank = CLUSTER > 1 ? blockIdx.x : halves ? warp * 2 / gemv_warps : 0;

  uint32_t units = (p.K + 255) / 256;
  uint32_t unit0 = rank * p.held, block_unit0 = CLUSTER == 1 ? 0 : unit0;
  uint32_t count = unit0 < units ? min(p.held, units - unit0) : 0;

  // The host counts on this order and these sizes: rings, barriers, zeros, x,
  // in a cluster a tile a warp, sums of blocks.
  uint8_t* barriers = memory + gemv_warps * p.stages * Weights::stage_bytes;
  uint8_t* summed_at = barriers + 8 * Weights::most_stages * gemv_warps;
  uint8_t* zeros = summed_at + 16;
  uint8_t* held = zeros + Way::zero_bytes;
  if (16 * (32 * warp + lane) < Way::zero_bytes) {
    *(uint4*)(zeros + 16 * lane) = make_uint4(0, 0, 0, 0);
  }
  uint32_t summed = shared_address(summed_at);
  if (CLUSTER > 1 && warp == 0 && lane == 0) {
    barrier_init(summed);
  }
  uint32_t row_bytes = p.K / F::block * (F::bytes / (256 / F::block));
  Weights ring(w, memory, barriers, p.stages, warp, lane, row_bytes);

  const T* first_x = x + x_offset(p, lhs, blockIdx.z);
  uint32_t x_units = CLUSTER == 1 ? units : count;
  typename Staging<T, typename Way::Task, ROWS, (Way::tiles > 1)>::Type staged(
      held, first_x, 256 * block_unit0, x_units, p, warp, lane);
  if (!p.early) { // x is on its way before w's bytes queue up in front of it
    staged.start();
  }

  uint32_t row0 = blockIdx.y * p.rows;
  uint32_t rows = min(p.rows, p.N - row0);
  uint32_t tiles = (rows + 15) / 16, split = p.split / 16;
  bool whole = split >= 4 * warps;
  uint32_t matrix = p.gather || p.w_step ? matrix_of(p, rhs, blockIdx.z) : 0;
  uint32_t mate = CLUSTER == 1 ? warp - rank * warps : warp; // of its rank
  Stretch fetched(mate, warps, split, tiles, count, whole);
  Stretch at = fetched;
  auto fill = [&](uint32_t stage, uint32_t barrier) {
    if (!fetched.done()) {
      uint32_t row = row0 + 16 * fetched.tile;
      ring.fill(stage, barrier, unit0 + fetched.unit, row, matrix);
      fetched.unit += COPY;
      if (fetched.unit >= fetched.end) {
        fetched.turn();
      }
    }
  };
  // A warp waits where the engine has enough to do: the first stage before x is
  // prepared, others in its course, or after that for one row of x, for which
  // all warps wait.
  uint32_t stage = ring.base, barrier = ring.barriers;
  uint32_t last_barrier = barrier + 8 * p.stages;
  auto fill_next = [&] {
    if (barrier != last_barrier) {
      fill(stage, barrier);
      barrier += 8;
      stage += Weights::stage_bytes;
    }
  };
  auto fill_all = [&] {
#pragma unroll 1
    while (barrier != last_barrier) {
      fill_next();
    }
  };
  fill_next();
  ring.init_second();
  if (p.early) { // w is there before x
    let_next_start();
    fill_all();
    wait_for_previous();
    staged.start();
  }
  if constexpr (ROWS == 1) {
    staged.put();
    if constexpr (CLUSTER == 1) {
      __syncthreads();
      fill_all();
    }
  } else {
    staged.put(fill_next);
    fill_all();
  }

  uint32_t M = ROWS == 1 ? 1 : p.M;
  uint32_t unit_bytes = Way::Task::unit_bytes(M);
  uint32_t tile_floats = 16 * M;
  uint32_t own = CLUSTER == 1 ? 0 : gemv_warps;
  uint32_t all_held = CLUSTER == 1 ? units : p.held;
  float* mine = (float*)(held + all_held * unit_bytes) + warp * tile_floats;
  float* sums = (float*)(held + all_held * unit_bytes) + own * tile_floats;
  uint32_t slots = whole ? 1 : parts_of_tile(warps, split, (p.held + 1) / 2);
  bool direct = CLUSTER == 1 && slots * ranks == 1;
  uint32_t most = (p.rows / 16 + CLUSTER - 1) / CLUSTER;
  uint32_t owned =
      CLUSTER == 1 ? tiles : (tiles + CLUSTER - 1 - rank) / CLUSTER;
  uint32_t used = (units + p.held - 1) / p.held; // ranks that have units
  if constexpr (CLUSTER > 1) {
    if (warp == 0 && lane == 0) {
      barrier_expect(summed, owned * used * slots * tile_floats * 4);
    }
    cluster_start();
  }
  c += blockIdx.z * p.c_step;
  y += blockIdx.z * p.y_step;
  if constexpr (ROWS > 1 || CLUSTER > 1) {
    __syncthreads();
  }
  if constexpr (CLUSTER > 1) {
    cluster_wait(); // all blocks are there to be written to
    if constexpr (ROWS == 1) {
      fill_all();
    }
  }

  typename Way::Operand operand(M, g, t);
  if constexpr (Way::zero_bytes != 0) {
    operand.zeros = zeros;
  }
  stage = ring.base, barrier = ring.barriers;
  uint32_t row_at = Weights::row(g), parity = 0;
  if constexpr (ROWS == 1) {
    row_at = kept(row_at);
  }
  // Only in the stretch's first tile it may not be the first.
  uint32_t slot = at.first_unit != 0 ? at.part(mate) : 0;
#pragma unroll 1
  while (!at.done()) {
    Sums<Way::tiles> total;
    operand.unit = held + (unit0 - block_unit0 + at.unit) * unit_bytes;
#pragma unroll 1
    do {
      barrier_wait(barrier, parity);
      uint32_t unit = unit0 + at.unit;
      const uint8_t* r0 = ring.at(stage) + row_at + ring.data(g, unit);
      UNROLL
      for (int i = 0; i < COPY; ++i) {
        if (i == 0 || at.unit + i < at.end) {
          int blocks = (p.K - 256 * (unit + i)) / F::block;
          const uint8_t* r = r0 + i * F::bytes;
          Way::Unit::unit(r, r + Weights::eight_bytes, blocks, operand, total);
          operand.unit += unit_bytes;
        }
      }
      __syncwarp();
      fill(stage, barrier);
      at.unit += COPY;
      barrier += 8;
      stage += Weights::stage_bytes;
      if (barrier == last_barrier) {
        barrier = ring.barriers;
        stage = ring.base;
        parity ^= 1;
      }
    } while (at.unit < at.end);

    // Of the last part on, what is left of a tile is zero.
    uint32_t part = at.first_segment() ? slot : 0;
    uint32_t end = at.ends_tile() ? slots : part + 1;
    uint32_t to = (part * ranks + rank) * most + at.tile / CLUSTER;
    uint32_t step = ranks * most * tile_floats;
    if constexpr (CLUSTER == 1) {
      Way::each(total, t, M, [&](int half, uint32_t m, float sum) {
        uint32_t r = Weights::number(g) + 8 * half, row = 16 * at.tile + r;
        if (!direct) {
          float* here = sums + to * tile_floats + 16 * m + r;
          *here = sum;
#pragma unroll 1
          for (uint32_t i = part + 1; i < end; ++i) {
            *(here += step) = 0.0f;
          }
        } else if (row < rows) {
          finish(p, c, y, uint64_t(m) * p.N + row0 + row, sum);
        }
      });
    } else {
      Way::each(total, t, M, [&](int half, uint32_t m, float sum) {
        mine[16 * m + Weights::number(g) + 8 * half] = sum;
      });
      __syncwarp();
      if (4 * lane < tile_floats) {
        float4 sum = *(const float4*)(mine + 4 * lane);
        uint32_t there = shared_address(sums + to * tile_floats + 4 * lane);
#pragma unroll 1
        for (; part < end; ++part) {
          put_remote(there, summed, at.tile % CLUSTER, sum);
          sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          there += 4 * step;
        }
      }
      __syncwarp();
    }
    at.turn();
  }
  if (direct) {
    return;
  }
  if constexpr (CLUSTER > 1) {
    barrier_wait(summed, 0);
  } else {
    __syncthreads();
  }
  uint32_t step = most * tile_floats;
  uint32_t owner = CLUSTER == 1 ? 0 : rank;
  for (uint32_t i = 32 * warp + lane; i < owned * tile_floats;
       i += 32 * gemv_warps) {
    uint32_t tile = ROWS == 1 ? i / 16 : quotient(i / 16, p.inverse);
    uint32_t m = i / 16 - tile * M;
    uint32_t row = 16 * (tile * CLUSTER + owner) + i % 16;
    if (row < rows) {
      // By ranks, then parts; four at a time, as each is a while in coming.
      float sum = 0.0f;
      uint32_t addends = used * slots, part = 0, at = i;
#pragma unroll 1
      for (uint32_t k = 0; k < addends; k += 4) {
        float v[4];
        UNROLL
        for (int j = 0; j < 4; ++j) {
          v[j] = k + j < addends ? sums[at] : 0.0f;
          at += ranks * step;
          if (++part == slots) {
            part = 0;
            at += step - slots * ranks * step;
          }
        }
        sum += v[0];
        sum += v[1];
        sum += v[2];
        sum += v[3];
      }
      finish(p, c, y, uint64_t(m) * p.N + row0 + row, sum);
    }
  }
}

#endif
