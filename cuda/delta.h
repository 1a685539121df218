// The gated delta rule of csrc/delta.h.
#pragma once
#include "step.h"
#include "step_params.h"

// How lanes share a head's state: each row is a few lanes', and each lane has
// every so many fours of its numbers, so that loads are without gaps.
template <int D>
struct DeltaRow {
  static constexpr uint32_t lanes = delta_lanes, fours = D / 4 / lanes;
  float4 v[fours];
  uint32_t lane;

  DEVICE DeltaRow(const float* row, uint32_t lane) : lane(lane) {
    UNROLL
    for (uint32_t i = 0; i < fours; ++i) {
      v[i] = ((const float4*)row)[i * lanes + lane];
    }
  }
  DEVICE void store(float* row) const {
    UNROLL
    for (uint32_t i = 0; i < fours; ++i) {
      ((float4*)row)[i * lanes + lane] = v[i];
    }
  }
  DEVICE static float dot(float4 a, float4 b, float sum) {
    return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
  }
  // One token. What S becomes need not be there for y:
  // S' q = g S q + beta (v - g S k) (k . q).
  DEVICE float take(
      const float4* q,
      const float4* k,
      float value,
      float decay,
      float beta,
      float both) {
    float of_k = 0.0f, of_q = 0.0f;
    UNROLL
    for (uint32_t i = 0; i < fours; ++i) {
      of_k = dot(v[i], k[i * lanes + lane], of_k);
      of_q = dot(v[i], q[i * lanes + lane], of_q);
    }
    of_k = sum_over<lanes>(of_k);
    of_q = sum_over<lanes>(of_q);
    float delta = beta * (value - decay * of_k);
    UNROLL
    for (uint32_t i = 0; i < fours; ++i) {
      float4 a = k[i * lanes + lane];
      v[i].x = fmaf(a.x, delta, decay * v[i].x);
      v[i].y = fmaf(a.y, delta, decay * v[i].y);
      v[i].z = fmaf(a.z, delta, decay * v[i].z);
      v[i].w = fmaf(a.w, delta, decay * v[i].w);
    }
    return fmaf(delta, both, decay * of_q);
  }
};

constexpr uint32_t delta_tokens = 16; // and rows of a block

// Block (i, h, b): 16 rows of head h. Tokens come into shared memory 16 at a
// time, the next ones while these are multiplied.
template <typename T, int D>
__global__ void __launch_bounds__(delta_threads) gated_delta(
    const T* q,
    const T* k,
    const T* v,
    const float* g,
    const T* beta,
    const float* from,
    const uint8_t* mask,
    T* y,
    float* to,
    uint32_t tokens,
    uint32_t key_heads,
    uint32_t rows) {
  typedef DeltaRow<D> Row;
  constexpr uint32_t block_rows = delta_threads / Row::lanes, fours = D / 4;
  constexpr uint32_t each = delta_tokens * fours / delta_threads;
  constexpr uint32_t values = delta_tokens * block_rows / delta_threads;
  __shared__ float4 queries[delta_tokens][fours], keys[delta_tokens][fours];
  __shared__ float value[delta_tokens][block_rows];
  __shared__ float decay[delta_tokens], factor[delta_tokens];
  __shared__ float both[delta_tokens];
  uint32_t heads = gridDim.y, h = blockIdx.y,
           first_row = blockIdx.x * block_rows;
  uint32_t key = h / (heads / key_heads);
  uint64_t token0 = uint64_t(blockIdx.z) * tokens;
  uint32_t lane = threadIdx.x % Row::lanes, row = threadIdx.x / Row::lanes;
  uint64_t at = (uint64_t(blockIdx.z) * heads + h) * rows + first_row + row;
  Row state(from + at * D, lane);

  float4 next_q[each], next_k[each];
  float next_v[values], next_decay = 0.0f, next_factor = 0.0f;
  auto fetch = [&](uint32_t first) {
    UNROLL
    for (uint32_t i = 0; i < each; ++i) {
      uint32_t n = threadIdx.x + i * delta_threads, t = first + n / fours;
      uint64_t x = ((token0 + min(t, tokens - 1)) * key_heads + key) * D;
      next_q[i] = load_4(q + x + 4 * (n % fours));
      next_k[i] = load_4(k + x + 4 * (n % fours));
    }
    UNROLL
    for (uint32_t i = 0; i < values; ++i) {
      uint32_t n = threadIdx.x + i * delta_threads, t = first + n / block_rows;
      uint64_t x = ((token0 + min(t, tokens - 1)) * heads + h) * rows;
      next_v[i] = widen(v[x + first_row + n % block_rows]);
    }
    uint32_t t = first + threadIdx.x;
    if (threadIdx.x < delta_tokens && t < tokens) {
      uint64_t x = (token0 + t) * heads + h;
      next_decay = g[x];
      next_factor = widen(beta[x]);
    }
  };
  fetch(0);
#pragma unroll 1
  for (uint32_t first = 0; first < tokens; first += delta_tokens) {
    UNROLL
    for (uint32_t i = 0; i < each; ++i) {
      uint32_t n = threadIdx.x + i * delta_threads;
      queries[n / fours][n % fours] = next_q[i];
      keys[n / fours][n % fours] = next_k[i];
    }
    UNROLL
    for (uint32_t i = 0; i < values; ++i) {
      uint32_t n = threadIdx.x + i * delta_threads;
      value[n / block_rows][n % block_rows] = next_v[i];
    }
    if (threadIdx.x < delta_tokens) {
      decay[threadIdx.x] = next_decay;
      factor[threadIdx.x] = next_factor;
    }
    __syncthreads();
    static_assert(block_rows == delta_tokens, "a token for the lanes of a row");
    float product = 0.0f;
    UNROLL
    for (uint32_t i = 0; i < Row::fours; ++i) {
      uint32_t n = i * Row::lanes + lane;
      product = Row::dot(queries[row][n], keys[row][n], product);
    }
    product = sum_over<Row::lanes>(product);
    if (lane == 0) {
      both[row] = product;
    }
    __syncthreads();
    if (first + delta_tokens < tokens) {
      fetch(first + delta_tokens);
    }
    uint32_t count = min(delta_tokens, tokens - first);
#pragma unroll 1
    for (uint32_t t = 0; t < count; ++t) {
      uint64_t token = token0 + first + t;
      float out = 0.0f;
      if (!mask || mask[token]) { // the same for all of a block
        out = state.take(
            queries[t], keys[t], value[t][row], decay[t], factor[t], both[t]);
      }
      if (lane == 0) {
        y[(token * heads + h) * rows + first_row + row] = narrow<T>(out);
      }
    }
    __syncthreads();
  }
  state.store(to + at * D);
}
