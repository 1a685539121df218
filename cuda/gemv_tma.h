// gemv for compute capability 9.0 and later, with the tensor copy engine
// bringing w. The grid is blocks of a cluster by clusters by batch entries, one
// block a multiprocessor: a cluster shares rows and splits K between its
// blocks, so that the work on x is split, too. WHOLE multiplies in whole
// numbers, for types that have a WholeUnit, otherwise it is done as in gemv.
//
// A block's work is tiles of 16 rows by pairs of units of 256 weights, tile by
// tile; its 16 warps have an equal stretch of that each. A tile's sums are
// added in the order of their blocks and warps, in the block that owns the
// tile. Stretches are those of `split` rows, whatever a cluster has (a multiple
// of it), so that sums have one order for all batches.
#pragma once
#include "gemv.h"
#include "tc/tma.h"
#include "tc/whole_blocks.h"

#if __CUDA_ARCH__ >= 900

constexpr uint32_t gemv_warps = 16;

// x on its way into shared memory and what units want of it, task by task: a
// unit of a row each, which the warp that copies it prepares in its place.
template <typename T, typename Task, bool MANY>
struct Staged {
  uint8_t* held;
  uint32_t tasks, M, inverse, warp, lane;

  DEVICE Staged(
      uint8_t* held,
      uint32_t count,
      const Params& p,
      uint32_t warp,
      uint32_t lane)
      : held(held),
        tasks(count * p.M),
        M(p.M),
        inverse(p.inverse),
        warp(warp),
        lane(lane) {}
  // Of rows of K, from weight k on. Past the end of a row there are zeros.
  DEVICE void copy(const T* x, uint32_t k, uint32_t K) const {
    uint32_t to = shared_address(held) + 16 * lane;
#pragma unroll 1
    for (uint32_t task = warp; task < tasks; task += gemv_warps) {
      uint32_t u = quotient(task, inverse), m = task - u * M;
      uint32_t at = k + 256 * u + 8 * lane;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                       to + u * Task::unit_bytes(M) + m * Task::row_bytes),
                   "l"(x + (at < K ? m * K + at : 0)),
                   "r"(at < K ? 16 : 0)
                   : "memory");
    }
  }
  DEVICE void put() const {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
    auto row_of = [&](uint32_t task) {
      uint32_t u = quotient(task, inverse);
      return held + u * Task::unit_bytes(M) + (task - u * M) * Task::row_bytes;
    };
    if constexpr (MANY) {
      // Two at a time, for each waits for shuffles. An odd one is done twice.
#pragma unroll 1
      for (uint32_t task = warp; task < tasks; task += 2 * gemv_warps) {
        uint32_t other = task + gemv_warps < tasks ? task + gemv_warps : task;
        Task::put2(row_of(task), row_of(other), lane);
      }
    } else {
#pragma unroll 1
      for (uint32_t task = warp; task < tasks; task += gemv_warps) {
        Task::put(row_of(task), lane);
      }
    }
  }
};

// How a type's units are multiplied: in f16, a row of x in a column.
template <typename F, typename T, int TILES, bool WHOLE>
struct Way {
  static_assert(TILES == 1, "f16 has one tile of columns");
  typedef HalfTask<T, typename F::Layout, F::summed> Task;
  typedef F Unit;
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

// In whole numbers: three digits of a row of x.
template <typename F, typename T, int TILES>
struct Way<F, T, TILES, true> {
  typedef WholeUnit<F> Unit;
  typedef WholeTask<T, typename Unit::Layout, F::summed != 0> Task;
  typedef WholeOperand<TILES> Operand;
  DEVICE static float number(float low, float middle, float high) {
    return fmaf(65536.0f, high, fmaf(256.0f, middle, low));
  }
  template <typename Put>
  DEVICE static void each(
      const Sums<TILES>& sums, uint32_t t, uint32_t M, const Put& put) {
    UNROLL
    for (int half = 0; half < 2; ++half) {
      if constexpr (TILES == 1) {
        const float* mine = sums.v[0] + 2 * half;
        float high = __shfl_xor_sync(~0u, mine[0], 1);
        if (t % 2 == 0 && t / 2 < M) {
          put(half, t / 2, number(mine[0], mine[1], high));
        }
      } else {
        UNROLL
        for (int i = 0; i < 2; ++i) {
          int c = 2 * half + i;
          if (2 * t + i < M) {
            put(half,
                2 * t + i,
                number(sums.v[0][c], sums.v[1][c], sums.v[2][c]));
          }
        }
      }
    }
  }
};

// The most parts that equal stretches make of one of `split` tiles of `pairs`:
// a tile is 16 / split of them, and ends of the two meet at multiples of even.
DEVICE uint32_t parts_of_tile(uint32_t split, uint32_t pairs) {
  uint32_t even = split & -split;
  uint32_t inside =
      2 * even > gemv_warps ? 0 : (gemv_warps - 2 * even) / split + 1;
  return min(pairs, inside + 1);
}

// Where a warp is in its stretch: pairs from begin to end of every `split`
// tiles, of which the block has `tiles`.
struct Stretch {
  uint32_t begin, end;
  uint32_t first_tile, first_unit; // of begin
  uint32_t split, tiles;
  uint32_t count; // units of a tile
  uint32_t item, base, tile, unit;

  DEVICE Stretch(
      uint32_t warp, uint32_t split, uint32_t tiles, uint32_t count, bool whole)
      : split(split), tiles(tiles), count(count), base(0) {
    uint32_t pairs = (count + 1) / 2;
    if (whole) {
      first_tile = warp * split / gemv_warps;
      first_unit = 0;
      begin = first_tile * pairs;
      end = (warp + 1) * split / gemv_warps * pairs;
    } else {
      begin = warp * split * pairs / gemv_warps;
      end = (warp + 1) * split * pairs / gemv_warps;
      first_tile = small_quotient(begin, pairs);
      first_unit = 2 * (begin - first_tile * pairs);
    }
    start();
  }
  // i / n for numbers whose halves and quotients a float tells apart.
  DEVICE static uint32_t small_quotient(uint32_t i, uint32_t n) {
    return uint32_t(__fdividef(float(i) + 0.5f, float(n)));
  }
  DEVICE void start() {
    item = begin;
    tile = base + first_tile;
    unit = first_unit;
    if (begin == end || count == 0) {
      tile = tiles;
    }
  }
  // Which part of its tile the stretch of a warp starts with, past the first.
  DEVICE uint32_t part(uint32_t warp) const {
    uint32_t pairs = (count + 1) / 2, all = split * pairs;
    if (all < gemv_warps) { // a pair each, for some
      return first_unit / 2;
    }
    uint32_t item = first_tile * pairs;
    return warp - small_quotient(gemv_warps * item + gemv_warps - 1, all);
  }
  DEVICE bool done() const {
    return tile >= tiles;
  }
  // Whether the unit and STEP - 1 more are the last of the tile, or of the
  // stretch.
  template <int STEP>
  DEVICE bool last_of_tile() const {
    return unit + STEP >= count;
  }
  template <int STEP>
  DEVICE bool last() const {
    return last_of_tile<STEP>() || ((unit + STEP) % 2 == 0 && item + 1 == end);
  }
  template <int STEP>
  DEVICE void next() {
    bool over = last_of_tile<STEP>();
    unit += STEP;
    if (over || unit % 2 == 0) {
      ++item;
    }
    if (over) {
      unit = 0;
      ++tile;
    }
    if (item == end) {
      base += split;
      start();
    }
  }
};

template <
    typename F,
    typename T,
    int COPY,
    int INTERLEAVE,
    int CLUSTER,
    int TILES,
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
  typedef Way<F, T, TILES, WHOLE> Way;
  typedef TmaRing<F, COPY, INTERLEAVE> Weights;
  extern __shared__ __align__(1024) uint8_t memory[];
  uint32_t lane = threadIdx.x, warp = threadIdx.y;
  uint32_t g = lane / 4, t = lane % 4;
  uint32_t rank = CLUSTER == 1 ? 0 : blockIdx.x;

  uint32_t units = (p.K + 255) / 256;
  uint32_t unit0 = rank * p.held;
  uint32_t count = unit0 < units ? min(p.held, units - unit0) : 0;

  // The host counts on this order and these sizes: rings, barriers, x, a tile a
  // warp, sums of blocks.
  uint32_t rings = gemv_warps * p.stages;
  uint8_t* barriers = memory + rings * Weights::stage_bytes;
  uint8_t* held = barriers + 8 * rings + 16;
  uint32_t summed = shared_address(barriers + 8 * rings);
  if (CLUSTER > 1 && warp == 0 && lane == 0) {
    barrier_init(summed);
  }
  uint32_t row_bytes = p.K / F::block * (F::bytes / (256 / F::block));
  Weights ring(memory, barriers, p.stages, warp, lane, row_bytes);

  // x is on its way before w's bytes queue up in front of it.
  Staged<T, typename Way::Task, (TILES > 1)> staged(held, count, p, warp, lane);
  staged.copy(x + x_offset(p, lhs, blockIdx.z), 256 * unit0, p.K);

  uint32_t row0 = blockIdx.y * p.rows;
  uint32_t rows = min(p.rows, p.N - row0);
  uint32_t tiles = (rows + 15) / 16, split = p.split / 16;
  bool whole = split >= 4 * gemv_warps;
  uint32_t matrix = p.gather || p.w_step ? matrix_of(p, rhs, blockIdx.z) : 0;
  Stretch fetched(warp, split, tiles, count, whole);
  Stretch at = fetched;
  auto fill = [&] {
    if (!fetched.done()) {
      ring.fill(w, unit0 + fetched.unit, row0 + 16 * fetched.tile, matrix);
      fetched.template next<COPY>();
    }
  };
  fill();
  staged.put();
#pragma unroll 1
  for (uint32_t i = 1; i < p.stages; ++i) {
    fill(); // which may wait
  }

  uint32_t unit_bytes = Way::Task::unit_bytes(p.M);
  uint32_t tile_floats = 16 * p.M;
  float* mine = (float*)(held + p.held * unit_bytes) + warp * tile_floats;
  float* sums = mine + (gemv_warps - warp) * tile_floats;
  uint32_t slots = whole ? 1 : parts_of_tile(split, (p.held + 1) / 2);
  bool direct = CLUSTER == 1 && slots == 1;
  uint32_t most = (p.rows / 16 + CLUSTER - 1) / CLUSTER;
  uint32_t owned = (tiles + CLUSTER - 1 - rank) / CLUSTER;
  uint32_t ranks = (units + p.held - 1) / p.held; // blocks that have units
  if constexpr (CLUSTER > 1) {
    if (warp == 0 && lane == 0) {
      barrier_expect(summed, owned * ranks * slots * tile_floats * 4);
    }
    cluster_start();
  }
  c += blockIdx.z * p.c_step;
  y += blockIdx.z * p.y_step;
  __syncthreads();
  if constexpr (CLUSTER > 1) {
    cluster_wait(); // all blocks are there to be written to
  }

  typename Way::Operand operand(p.M, g, t);
  Sums<TILES> total;
  // Only in the stretch's first tile it may not be the first.
  uint32_t slot = at.first_unit != 0 ? at.part(warp) : 0;
  while (!at.done()) {
    uint32_t unit = unit0 + at.unit;
    const uint8_t* r0 = ring.take() + ring.row(g, unit);
    UNROLL
    for (int i = 0; i < COPY; ++i) {
      if (i == 0 || at.unit + i < at.count) {
        operand.unit = held + (at.unit + i) * unit_bytes;
        int blocks = (p.K - 256 * (unit + i)) / F::block;
        const uint8_t* r = r0 + i * F::bytes;
        Way::Unit::unit(r, r + Weights::eight_bytes, blocks, operand, total);
      }
    }
    __syncwarp();
    fill();
    if (at.template last<COPY>()) {
      Way::each(total, t, p.M, [&](int half, uint32_t m, float sum) {
        mine[16 * m + Weights::number(g) + 8 * half] = sum;
      });
      total = Sums<TILES>();
      __syncwarp();
      // Of the last part on, what is left of a tile is zero.
      uint32_t part = at.tile - at.base == at.first_tile ? slot : 0;
      uint32_t end = at.template last_of_tile<COPY>() ? slots : part + 1;
      if (4 * lane < tile_floats) {
        float4 sum = *(const float4*)(mine + 4 * lane);
        if (direct) {
          const float v[4] = {sum.x, sum.y, sum.z, sum.w};
          UNROLL
          for (uint32_t i = 0; i < 4; ++i) {
            uint32_t row = 16 * at.tile + (4 * lane + i) % 16;
            if (row < rows) {
              finish(p, c, y, uint64_t(lane / 4) * p.N + row0 + row, v[i]);
            }
          }
        } else {
          uint32_t tile = (part * CLUSTER + rank) * most + at.tile / CLUSTER;
          float* to = sums + tile * tile_floats + 4 * lane;
#pragma unroll 1
          for (; part < end; ++part) {
            if constexpr (CLUSTER == 1) {
              *(float4*)to = sum;
            } else {
              put_remote(shared_address(to), summed, at.tile % CLUSTER, sum);
            }
            sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            to += CLUSTER * most * tile_floats;
          }
        }
      }
      __syncwarp();
    }
    at.template next<COPY>();
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
  for (uint32_t i = 32 * warp + lane; i < owned * tile_floats;
       i += 32 * gemv_warps) {
    uint32_t tile = quotient(i / 16, p.inverse), m = i / 16 - tile * p.M;
    uint32_t row = 16 * (tile * CLUSTER + rank) + i % 16;
    if (row < rows) {
      float sum = 0.0f;
#pragma unroll 1
      for (uint32_t k = 0; k < ranks; ++k) {
#pragma unroll 1
        for (uint32_t part = 0; part < slots; ++part) {
          sum += sums[(part * CLUSTER + k) * step + i];
        }
      }
      finish(p, c, y, uint64_t(m) * p.N + row0 + row, sum);
    }
  }
}

#endif
