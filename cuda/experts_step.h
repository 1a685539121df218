// Mixtures of experts in a step: which experts a token goes to, and the sum of
// what they make of it.
#pragma once
#include "step.h"
#include "step_params.h"

// Logits, a warp each; the last block to be done chooses the experts of the
// largest. `shares` are their probabilities and, where there is one, that of
// the shared expert, whose logit is the last. `done` is 0 before and
// afterwards.
template <typename T>
__global__ void __launch_bounds__(32 * route_warps) route(
    const T* x,
    const float* router,
    float* logits,
    uint32_t* chosen,
    float* shares,
    uint32_t* done,
    const __grid_constant__ RouteParams p) {
  constexpr uint32_t most = most_experts / 32;
  __shared__ bool last;
  uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t row = blockIdx.x * route_warps + warp;
  const float* mine = router + uint64_t(row) * p.hidden;
  for (uint32_t i = 32 * lane; row < p.rows && i < p.hidden; i += 1024) {
    prefetch(mine + i);
  }
  let_next_start();
  wait_for_previous();
  if (row < p.rows) {
    float sum = 0.0f;
    for (uint32_t i = 4 * lane; i < p.hidden; i += 128) {
      float4 a = load_4(x + i), b = *(const float4*)(mine + i);
      sum = fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
    }
    sum = sum_over<32>(sum);
    if (lane == 0) {
      logits[row] = sum;
    }
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicInc(done, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last || warp != 0) {
    return;
  }
  __threadfence();
  constexpr float none = -1e30f;
  float v[most], largest = none, total = 0.0f;
  UNROLL
  for (uint32_t j = 0; j < most; ++j) {
    uint32_t e = lane + 32 * j;
    v[j] = e < p.experts ? read_sum<true>(logits + e) : none;
    largest = fmaxf(largest, v[j]);
  }
  UNROLL
  for (int i = 16; i > 0; i /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, i));
  }
  UNROLL
  for (uint32_t j = 0; j < most; ++j) {
    total += v[j] > none ? expf(v[j] - largest) : 0.0f;
  }
  total = sum_over<32>(total);
  float share = 0.0f, shared_out = 0.0f;
  uint32_t expert = 0;
  for (uint32_t i = 0; i < p.used; ++i) {
    float best = none;
    uint32_t at = 0;
    UNROLL
    for (uint32_t j = 0; j < most; ++j) {
      if (v[j] > best) {
        best = v[j];
        at = lane + 32 * j;
      }
    }
    UNROLL
    for (int step = 16; step > 0; step /= 2) { // of equal ones the first
      float other = __shfl_xor_sync(~0u, best, step);
      uint32_t there = __shfl_xor_sync(~0u, at, step);
      if (other > best || (other == best && there < at)) {
        best = other;
        at = there;
      }
    }
    float probability = expf(best - largest) / total;
    shared_out += probability;
    if (lane == i) {
      share = probability;
      expert = at;
    }
    UNROLL
    for (uint32_t j = 0; j < most; ++j) {
      if (at == lane + 32 * j) {
        v[j] = none;
      }
    }
  }
  if (lane < p.used) {
    chosen[lane] = expert;
    shares[lane] = p.normalised ? share / shared_out : share;
  }
  if (lane == 0 && p.rows > p.experts) {
    float gate = read_sum<true>(logits + p.experts);
    shares[p.used] = 1.0f / (1.0f + expf(-gate));
  }
}

// y = h + the sum of `used` rows of N numbers, each times its share, and of the
// shared one.
template <typename T>
__global__ void __launch_bounds__(combine_threads) combine(
    const T* h,
    const T* rows,
    const T* shared,
    const float* shares,
    T* y,
    uint32_t N,
    uint32_t used) {
  typedef Pack<T, 8> P;
  uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  let_next_start();
  if (i >= N / 8) {
    return;
  }
  float sum[8], v[8];
  wait_for_previous();
  P::load(h + 8 * i).widened(sum);
  auto add = [&](const T* from, float share) {
    P::load(from + 8 * i).widened(v);
    UNROLL
    for (int j = 0; j < 8; ++j) {
      sum[j] = fmaf(share, v[j], sum[j]);
    }
  };
  for (uint32_t k = 0; k < used; ++k) {
    add(rows + uint64_t(k) * N, shares[k]);
  }
  if (shared) {
    add(shared, shares[used]);
  }
  store_8(y + 8 * i, sum);
}
