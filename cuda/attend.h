// Attention of a step, with all that precedes it.
#pragma once
#include "step.h"
#include "step_params.h"

// A head's row in shared memory: normed if there are weights, then turned. One
// warp. `turns` are cosines, then as many sines.
template <typename T>
DEVICE void prepare_head(
    const T* from,
    const T* weight,
    float* row,
    uint32_t D,
    const float* turns,
    const AttendParams& p) {
  uint32_t lane = threadIdx.x % 32;
  float sum = 0.0f;
  for (uint32_t i = lane; i < D; i += 32) {
    float v = widen(from[i]);
    row[i] = v;
    sum = fmaf(v, v, sum);
  }
  if (weight) {
    float factor = rsqrtf(sum_over<32>(sum) / D + p.eps);
    for (uint32_t i = lane; i < D; i += 32) {
      row[i] *= factor * widen(weight[i]);
    }
  }
  __syncwarp();
  for (uint32_t i = lane; i < p.pairs; i += 32) {
    float* a = row + (p.traditional ? 2 * i : i);
    float* b = p.traditional ? a + 1 : a + p.pairs;
    float c = turns[i], s = turns[p.pairs + i], x = *a, y = *b;
    *a = x * c - y * s;
    *b = x * s + y * c;
  }
  __syncwarp();
}

constexpr float no_score = -1e30f;

// A softmax's sums over some keys: of weights 2^(score - most), and of values
// times these.
template <int E>
struct Softmax {
  float most = no_score;
  float sum = 0.0f;
  float v[E] = {};

  DEVICE void add(float score, const float* value) {
    float both = fmaxf(most, score);
    float a = exp2f(most - both), b = exp2f(score - both);
    most = both;
    sum = sum * a + b;
    UNROLL
    for (int i = 0; i < E; ++i) {
      v[i] = fmaf(value[i], b, v[i] * a);
    }
  }
  // All sums of a warp's lanes that are multiples of LANES apart.
  template <int LANES>
  DEVICE void add_lanes() {
    float both = most;
    UNROLL
    for (int i = LANES; i < 32; i *= 2) {
      both = fmaxf(both, __shfl_xor_sync(~0u, both, i));
    }
    float a = exp2f(most - both);
    most = both;
    sum *= a;
    UNROLL
    for (int j = 0; j < E; ++j) {
      v[j] *= a;
    }
    UNROLL
    for (int i = LANES; i < 32; i *= 2) {
      sum += __shfl_xor_sync(~0u, sum, i);
      UNROLL
      for (int j = 0; j < E; ++j) {
        v[j] += __shfl_xor_sync(~0u, v[j], i);
      }
    }
  }
};

// Number d of D of a head: the sums of `count` warps, or of other blocks, each
// D numbers, the largest score and the sum of weights.
template <int D, bool OTHERS>
DEVICE Softmax<1> add_up(
    const float* from, uint32_t d, uint32_t count, uint32_t step) {
  Softmax<1> all;
  for (uint32_t i = 0; i < count; ++i) {
    all.most = fmaxf(all.most, read_sum<OTHERS>(from + i * step + D));
  }
  for (uint32_t i = 0; i < count; ++i) {
    const float* one = from + i * step;
    float a = exp2f(read_sum<OTHERS>(one + D) - all.most);
    all.sum += a * read_sum<OTHERS>(one + D + 1);
    all.v[0] += a * read_sum<OTHERS>(one + d);
  }
  return all;
}

// Attention of one token. qkv is its queries, keys and values, D numbers a
// head; where p.gated a query is followed by its head's gate. Norms and turns
// queries and key, puts key and value into their row of the caches, [heads of
// keys, capacity, D], and attends to all rows up to it.
//
// Block (h, s) takes G heads of queries, which share one of keys, and p.split
// rows of it. LANES lanes share a key, each with D / LANES of its numbers.
// Where rows are split, the last block of its heads to be done adds up what all
// have left in `partial`. `done` counts blocks, and is 0 before and afterwards.
template <typename T, int D, int G, int LANES, int WARPS>
__global__ void __launch_bounds__(32 * WARPS) attend(
    const T* qkv,
    const T* q_norm,
    const T* k_norm,
    T* keys,
    T* values,
    T* y,
    float* partial,
    uint32_t* done,
    const AttendParams* params) {
  constexpr int E = D / LANES, groups = 32 * WARPS / LANES;
  constexpr uint32_t row_sums = D + 2;
  typedef Pack<T, E> P;
  __shared__ float rows[(G + 1) * D];
  __shared__ float turns[D];
  __shared__ float sums[WARPS * G * row_sums];
  __shared__ bool last;
  const AttendParams& p = *params;
  uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t head0 = blockIdx.x * G, heads = gridDim.x * G;
  uint32_t key_head = head0 / p.group, key_heads = heads / p.group;
  uint32_t first = blockIdx.y * p.split;
  uint32_t end = min(first + p.split, p.position);
  uint32_t blocks = p.blocks;
  if (blockIdx.y >= blocks) {
    return;
  }
  keys += uint64_t(key_head) * p.capacity * D;
  values += uint64_t(key_head) * p.capacity * D;
  uint32_t step = p.gated ? 2 * D : D; // from query to query
  const T* key = qkv + heads * step + key_head * D;
  const T* value = key + key_heads * D;

  // What does not come from the kernel before.
  uint32_t at = threadIdx.x % LANES * E, group = threadIdx.x / LANES;
  for (uint32_t row = first + group; row < end; row += groups) {
    prefetch(keys + uint64_t(row) * D + at);
    prefetch(values + uint64_t(row) * D + at);
  }
  for (uint32_t i = threadIdx.x; i < 2 * p.pairs; i += 32 * WARPS) {
    turns[i] = i < p.pairs ? p.cosines[i] : p.sines[i - p.pairs];
  }
  __syncthreads();
  let_next_start();
  wait_for_previous();

  P newest_v = P::load(value + at);
  bool newest = blockIdx.y == blocks - 1; // it has the token itself
  bool writes = newest && head0 % p.group == 0;
  for (uint32_t r = warp; r < (newest ? G + 1 : G); r += WARPS) {
    bool is_key = r == G;
    float* row = rows + r * D;
    prepare_head(
        is_key ? key : qkv + (head0 + r) * step,
        is_key ? k_norm : q_norm,
        row,
        D,
        turns,
        p);
    for (uint32_t i = lane; i < D; i += 32) {
      if (is_key) {
        T rounded = narrow<T>(row[i]);
        row[i] = widen(rounded);
        if (writes) {
          keys[uint64_t(p.position) * D + i] = rounded;
          values[uint64_t(p.position) * D + i] = value[i];
        }
      } else {
        row[i] *= p.scale;
      }
    }
  }
  __syncthreads();

  float q[G][E];
  UNROLL
  for (int g = 0; g < G; ++g) {
    UNROLL
    for (int i = 0; i < E; ++i) {
      q[g][i] = rows[g * D + at + i];
    }
  }
  Softmax<E> total[G];
  // Lanes of a warp go together: those past the end count for nothing.
  auto add = [&](const float* k, const float* v, bool there) {
    UNROLL
    for (int g = 0; g < G; ++g) {
      float score = 0.0f;
      UNROLL
      for (int i = 0; i < E; ++i) {
        score = fmaf(q[g][i], k[i], score);
      }
      score = sum_over<LANES>(score);
      if (there) {
        total[g].add(score, v);
      }
    }
  };
  auto load = [&](const T* from, uint32_t row) {
    return P::load(from + uint64_t(min(row, end - 1)) * D + at);
  };
  float k[E], v[E];
  if (first < end) {
    P next_k = load(keys, first + group), next_v = load(values, first + group);
    for (uint32_t row = first; row < end; row += groups) {
      next_k.widened(k);
      next_v.widened(v);
      next_k = load(keys, row + groups + group);
      next_v = load(values, row + groups + group);
      add(k, v, row + group < end);
    }
  }
  if (newest && warp == 0) {
    UNROLL
    for (int i = 0; i < E; ++i) {
      k[i] = rows[G * D + at + i];
    }
    newest_v.widened(v);
    add(k, v, group == 0);
  }

  UNROLL
  for (int g = 0; g < G; ++g) {
    total[g].template add_lanes<LANES>();
    if (lane < LANES) {
      float* to = sums + (warp * G + g) * row_sums;
      UNROLL
      for (int i = 0; i < E; ++i) {
        to[at + i] = total[g].v[i];
      }
      to[D] = total[g].most;
      to[D + 1] = total[g].sum;
    }
  }
  __syncthreads();

  auto write = [&](uint32_t g, uint32_t d, const Softmax<1>& all) {
    float v = all.v[0] / all.sum;
    if (p.gated) {
      v /= 1.0f + expf(-widen(qkv[(head0 + g) * step + D + d]));
    }
    y[(head0 + g) * D + d] = narrow<T>(v);
  };
  float* mine = partial + uint64_t(head0) * gridDim.y * row_sums;
  for (uint32_t i = threadIdx.x; i < G * D; i += 32 * WARPS) {
    uint32_t g = i / D, d = i % D;
    Softmax<1> all =
        add_up<D, false>(sums + g * row_sums, d, WARPS, G * row_sums);
    if (blocks == 1) {
      write(g, d, all);
      continue;
    }
    float* to = mine + (uint64_t(g) * gridDim.y + blockIdx.y) * row_sums;
    to[d] = all.v[0];
    if (d == 0) {
      to[D] = all.most;
      to[D + 1] = all.sum;
    }
  }
  if (blocks == 1) {
    return;
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicInc(done + blockIdx.x, blocks - 1) == blocks - 1;
  }
  __syncthreads();
  if (!last) {
    return;
  }
  __threadfence();
  for (uint32_t i = threadIdx.x; i < G * D; i += 32 * WARPS) {
    uint32_t g = i / D, d = i % D;
    Softmax<1> all = add_up<D, true>(
        mine + uint64_t(g) * gridDim.y * row_sums, d, blocks, row_sums);
    write(g, d, all);
  }
}
