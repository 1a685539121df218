// What a token needs between two products beside attention: norms and the gate.
// One row of x; in f32, rounded once.
#pragma once
#include "common.h"

// N numbers as they lie in memory, an even number of them, in the widest loads.
template <typename T, int N>
struct Pack {
  static constexpr int bytes = N * sizeof(T), words = bytes / 4;
  uint32_t word[words];

  DEVICE static Pack load(const T* from) {
    Pack out;
    UNROLL
    for (int i = 0; i < words;) {
      if (bytes % 16 == 0) {
        uint4 v = ((const uint4*)from)[i / 4];
        out.word[i++] = v.x;
        out.word[i++] = v.y;
        out.word[i++] = v.z;
        out.word[i++] = v.w;
      } else {
        out.word[i] = ((const uint32_t*)from)[i];
        ++i;
      }
    }
    return out;
  }
  DEVICE void widened(float* out) const {
    UNROLL
    for (int i = 0; i < N; ++i) {
      uint32_t bits = word[i * sizeof(T) / 4];
      out[i] = number(bits >> (sizeof(T) == 2 && i % 2 ? 16 : 0), T());
    }
  }

 private:
  DEVICE static float number(uint32_t bits, float) {
    return as_float(bits);
  }
  DEVICE static float number(uint32_t bits, half_t) {
    return widen(half_t{uint16_t(bits)});
  }
  DEVICE static float number(uint32_t bits, bfloat_t) {
    return widen(bfloat_t{uint16_t(bits)});
  }
};

template <typename T>
DEVICE float4 load_4(const T* from) {
  float v[4];
  Pack<T, 4>::load(from).widened(v);
  return make_float4(v[0], v[1], v[2], v[3]);
}

// Rounds and writes 8 numbers.
template <typename T>
DEVICE void store_8(T* to, const float* v) {
  struct __align__(16) {
    T v[8];
  } out;
  UNROLL
  for (int i = 0; i < 8; ++i) {
    out.v[i] = narrow<T>(v[i]);
  }
  UNROLL
  for (int i = 0; i < int(sizeof(out) / 16); ++i) {
    ((uint4*)to)[i] = ((const uint4*)&out)[i];
  }
}

// What other blocks wrote is read past what this processor may have kept.
template <bool OTHERS>
DEVICE float read_sum(const float* p) {
  if (!OTHERS) {
    return *p;
  }
  float out;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(out) : "l"(p) : "memory");
  return out;
}

DEVICE void prefetch(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// A sum over lanes that are COUNT apart and closer, which all get.
template <int COUNT>
DEVICE float sum_over(float v) {
  UNROLL
  for (int i = COUNT / 2; i > 0; i /= 2) {
    v += __shfl_xor_sync(~0u, v, i);
  }
  return v;
}

// One block; N is a multiple of 8.
template <typename T>
__global__ void __launch_bounds__(1024)
    rms_norm(const T* x, const T* w, T* y, uint32_t N, float eps) {
  typedef Pack<T, 8> P;
  __shared__ float sums[32];
  uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float v[8], u[8], sum = 0.0f;
  let_next_start();
  wait_for_previous();
  for (uint32_t i = threadIdx.x; i < N / 8; i += blockDim.x) {
    P::load(x + 8 * i).widened(v);
    UNROLL
    for (int j = 0; j < 8; ++j) {
      sum = fmaf(v[j], v[j], sum);
    }
  }
  sum = sum_over<32>(sum);
  if (lane == 0) {
    sums[warp] = sum;
  }
  __syncthreads();
  sum = sum_over<32>(lane < (blockDim.x + 31) / 32 ? sums[lane] : 0.0f);
  float factor = rsqrtf(sum / N + eps);
  for (uint32_t i = threadIdx.x; i < N / 8; i += blockDim.x) {
    P::load(x + 8 * i).widened(v);
    P::load(w + 8 * i).widened(u);
    UNROLL
    for (int j = 0; j < 8; ++j) {
      v[j] *= factor * u[j];
    }
    store_8(y + 8 * i, v);
  }
}

DEVICE float silu(float v) {
  return v / (1.0f + expf(-v));
}

// y = silu(gate) * up of N numbers each, one after the other in a row of x. The
// grid is parts of a row by rows.
template <typename T>
__global__ void __launch_bounds__(256) gated(const T* x, T* y, uint32_t N) {
  typedef Pack<T, 8> P;
  uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  let_next_start();
  if (i >= N / 8) {
    return;
  }
  float gate[8], up[8];
  x += uint64_t(blockIdx.y) * 2 * N;
  y += uint64_t(blockIdx.y) * N;
  wait_for_previous();
  P::load(x + 8 * i).widened(gate);
  P::load(x + N + 8 * i).widened(up);
  UNROLL
  for (int j = 0; j < 8; ++j) {
    up[j] *= silu(gate[j]);
  }
  store_8(y + 8 * i, up);
}
