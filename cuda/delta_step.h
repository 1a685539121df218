// A token of a gated delta rule in a step: the convolution, the rule and what
// its output is normed and gated with.
#pragma once
#include "delta.h"

// Block h takes head h. `in` is q, k, v and z of all heads; `window` twice the
// last inputs of the convolution, of which this token reads one and writes the
// other.
template <typename T, int D>
__global__ void __launch_bounds__(delta_lanes* D) delta_step(
    const T* x,
    const T* in,
    const float* gates,
    const T* taps,
    const float* dt_bias,
    const float* a_log,
    const T* norm,
    T* window,
    float* states,
    T* y,
    const AttendParams* params,
    const __grid_constant__ DeltaStepParams p) {
  typedef DeltaRow<D> Row;
  constexpr uint32_t threads = delta_lanes * D, warps = threads / 32;
  constexpr uint32_t fours = D / 4;
  __shared__ float4 tokens[3][fours]; // q, k and v
  __shared__ float out[D], sums[2][warps];
  __shared__ float decay, factor;
  uint32_t heads = gridDim.x, h = blockIdx.x, turn = params->turn;
  uint32_t repeats = heads / p.key_heads;
  uint32_t key = p.tiled ? h % p.key_heads : h / repeats;
  bool first_of_key = p.tiled ? h < p.key_heads : h % repeats == 0;
  uint32_t channels = (2 * p.key_heads + heads) * D;
  uint32_t lane = threadIdx.x % Row::lanes, row = threadIdx.x / Row::lanes;
  uint32_t warp = threadIdx.x / 32;

  // What does not come from the kernel before.
  float* mine = states + (uint64_t(h) * D + row) * D;
  Row state(mine, lane);
  const float* gate = gates + uint64_t(h) * p.hidden;
  const float* other_gate = gate + uint64_t(heads) * p.hidden;
  for (uint32_t i = 4 * threadIdx.x; i < p.hidden; i += 4 * threads) {
    prefetch(gate + i);
    prefetch(other_gate + i);
  }
  uint32_t part = threadIdx.x / D, i = threadIdx.x % D;
  uint32_t channel = (part * p.key_heads + (part == 2 ? h : key)) * D + i;
  uint32_t before = p.taps - 1; // tokens of a window
  float old[most_taps - 1], tap[most_taps];
  if (part < 3) {
    UNROLL
    for (uint32_t j = 0; j < most_taps; ++j) {
      tap[j] = j < p.taps ? widen(taps[channel * p.taps + j]) : 0.0f;
    }
    UNROLL
    for (uint32_t j = 0; j + 1 < most_taps; ++j) {
      old[j] = j < before
                   ? widen(window[(turn * before + j) * channels + channel])
                   : 0.0f;
    }
  }
  let_next_start();
  wait_for_previous();

  float a = 0.0f, b = 0.0f;
  for (uint32_t n = 4 * threadIdx.x; n < p.hidden; n += 4 * threads) {
    float4 v = load_4(x + n);
    a = Row::dot(v, *(const float4*)(gate + n), a);
    b = Row::dot(v, *(const float4*)(other_gate + n), b);
  }
  a = sum_over<32>(a);
  b = sum_over<32>(b);
  if (threadIdx.x % 32 == 0) {
    sums[0][warp] = a;
    sums[1][warp] = b;
  }
  if (part < 3) {
    float newest = widen(in[channel]), sum = 0.0f;
    T* next = window + (turn ^ 1) * before * channels + channel;
    UNROLL
    for (uint32_t j = 0; j < most_taps; ++j) {
      if (j < p.taps) {
        float v = j < before && j + 1 < most_taps ? old[j] : newest;
        sum = fmaf(tap[j], v, sum);
        if (j > 0 && (part == 2 || first_of_key)) {
          next[(j - 1) * channels] = narrow<T>(v);
        }
      }
    }
    ((float*)tokens[part])[i] = silu(sum);
  }
  __syncthreads();
  if (warp < 2) { // q and k to norms of 1, and q by the scale of outputs
    float* v = (float*)tokens[warp];
    float squares = 0.0f;
    for (uint32_t j = threadIdx.x % 32; j < D; j += 32) {
      squares = fmaf(v[j], v[j], squares);
    }
    float scale = rsqrtf(sum_over<32>(squares) + 1e-6f);
    scale *= warp == 0 ? rsqrtf(float(D)) : 1.0f;
    for (uint32_t j = threadIdx.x % 32; j < D; j += 32) {
      v[j] *= scale;
    }
  } else if (warp == 2) {
    uint32_t j = threadIdx.x % 32;
    float dt = sum_over<32>(j < warps ? sums[0][j] : 0.0f) + dt_bias[h];
    float beta = sum_over<32>(j < warps ? sums[1][j] : 0.0f);
    dt = fmaxf(dt, 0.0f) + log1pf(expf(-fabsf(dt))); // softplus
    decay = expf(-expf(a_log[h]) * dt);
    factor = 1.0f / (1.0f + expf(-beta));
  }
  __syncthreads();
  const float4 *q = tokens[0], *k = tokens[1];
  float both = 0.0f;
  UNROLL
  for (uint32_t j = 0; j < Row::fours; ++j) {
    both = Row::dot(q[j * Row::lanes + lane], k[j * Row::lanes + lane], both);
  }
  both = sum_over<Row::lanes>(both);
  float value = ((const float*)tokens[2])[row];
  float result = state.take(q, k, value, decay, factor, both);
  state.store(mine);
  if (lane == 0) {
    out[row] = result;
  }
  __syncthreads();
  if (threadIdx.x < D) {
    float squares = 0.0f;
    for (uint32_t j = threadIdx.x % 32; j < D; j += 32) {
      squares = fmaf(out[j], out[j], squares);
    }
    float z = widen(in[channels + h * D + i]);
    float v = out[i] * rsqrtf(sum_over<32>(squares) / D + p.eps);
    y[h * D + i] = narrow<T>(v * widen(norm[i]) * silu(z));
  }
}
