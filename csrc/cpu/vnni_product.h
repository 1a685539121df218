// The gemv on vnni.h's codes: 1 to 8 rows of x for every read of the weights.
#pragma once

#include <cmath>

#include "cpu/vnni.h"

namespace mlx_gguf::cpu::MLX_GGUF_ISA {
namespace {

// 256 values of x: round(x / scale) in three planes of 8 bits, the highest
// first, and the sums of x, as rounded, over every 16. The scale is that of the
// two higher planes taken as one number.
struct alignas(64) FixedBlock {
  int8_t plane[3][256];
  float sums[16];
  float scale;
};

int64_t fixed_bytes(int64_t K) {
  return (K + 255) / 256 * static_cast<int64_t>(sizeof(FixedBlock));
}

// The largest whole number of three signed bytes.
constexpr float most_fixed = (127 * 256 + 127) * 256.0f + 127;

// A block whose largest value lies outside has no useful power of two.
constexpr float smallest = 1e-20f, largest = 1e37f;

__m512 load_part(const float* x, int64_t left) {
  __mmask16 mask = left >= 16 ? 0xffff : left <= 0 ? 0 : (1u << left) - 1;
  return _mm512_maskz_loadu_ps(mask, x);
}

// The largest magnitude, or NaN if one is infinite or NaN itself.
float largest_of(const float* x, int64_t left) {
  __m512 most = _mm512_setzero_ps(), not_a_number = most;
  for (int i = 0; i < 256; i += 16) {
    __m512 v = load_part(x + i, left - i);
    most = _mm512_max_ps(most, _mm512_abs_ps(v));
    // x - x is 0 but for infinities and NaN, which max may drop.
    not_a_number = _mm512_add_ps(not_a_number, _mm512_sub_ps(v, v));
  }
  return _mm512_reduce_max_ps(most) + _mm512_reduce_add_ps(not_a_number);
}

void fix_block(const float* x, int64_t left, float most, FixedBlock* out) {
  int exponent;
  std::frexp(most, &exponent);
  int shift = most == 0 ? 0 : 23 - exponent;
  if (std::ldexp(most, shift) > most_fixed) {
    --shift;
  }
  __m512 up = _mm512_set1_ps(std::ldexp(1.0f, shift));
  float down = std::ldexp(1.0f, -shift);
  for (int i = 0; i < 256; i += 16) {
    __m512 v = load_part(x + i, left - i);
    __m512i n = _mm512_cvtps_epi32(_mm512_mul_ps(v, up));
    out->sums[i / 16] = static_cast<float>(_mm512_reduce_add_epi32(n)) * down;
    for (int p = 2; p >= 0; --p) {
      auto to = reinterpret_cast<__m128i*>(out->plane[p] + i);
      _mm_store_si128(to, _mm512_cvtepi32_epi8(n));
      // What is left, exactly, above the signed byte just written.
      n = _mm512_srai_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(128)), 8);
    }
  }
  out->scale = down * 256;
}

// A row of x as FixedBlocks, or false if it has values that fixed point does
// not hold. What does not fill a block lies at the end of one, behind zeros:
// gemv_row then reads the row's last 256 weights, some for the second time. A
// row shorter than a block lies at its start.
bool fix(const float* x, int64_t K, void* out) {
  auto block = static_cast<FixedBlock*>(out);
  for (int64_t k = 0; k < K; k += 256, ++block) {
    float tail[256] = {};
    const float* from = x + k;
    int64_t left = K - k;
    if (left < 256 && K > 256) {
      std::memcpy(tail + 256 - left, from, sizeof(float) * left);
      from = tail;
      left = 256;
    }
    float most = largest_of(from, left);
    if (!(most == 0 || (most >= smallest && most <= largest))) {
      return false;
    }
    fix_block(from, left, most, block);
  }
  return true;
}

// One row of weights by C rows of x over one super-block.
template <typename Type, int C>
void super_block(const uint8_t* w, const FixedBlock* const* x, __m512* acc) {
  const __m512i sixteenths =
      _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  const __m512i zero = _mm512_setzero_si512();
  Affine affine = Vnni<Type>::affine(w);
  __m512 sum[C];
  for (int i = 0; i < C; ++i) {
    sum[i] = _mm512_setzero_ps();
  }
  for (int c = 0; c < 4; ++c) {
    __m512i codes = Vnni<Type>::codes(w, c);
    __m512 scale = _mm512_permutexvar_ps(
        _mm512_add_epi32(sixteenths, _mm512_set1_epi32(4 * c)), affine.scale);
    for (int i = 0; i < C; ++i) {
      auto dot = [&](__m512i start, int plane) {
        return _mm512_dpbusd_epi32(
            start, codes, _mm512_load_si512(x[i]->plane[plane] + 64 * c));
      };
      __m512i high = dot(_mm512_slli_epi32(dot(zero, 0), 8), 1);
      __m512 f = _mm512_fmadd_ps(
          _mm512_cvtepi32_ps(dot(zero, 2)),
          _mm512_set1_ps(1.0f / 256),
          _mm512_cvtepi32_ps(high));
      sum[i] = _mm512_fmadd_ps(f, scale, sum[i]);
    }
  }
  for (int i = 0; i < C; ++i) {
    acc[i] = _mm512_fmadd_ps(sum[i], _mm512_set1_ps(x[i]->scale), acc[i]);
    acc[i] = _mm512_fmadd_ps(affine.offset, _mm512_load_ps(x[i]->sums), acc[i]);
  }
}

float sum_lanes(__m512 v) {
  __m256 a =
      _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

template <typename Type, int C>
void gemv_row(
    const uint8_t* w, int64_t K, const FixedBlock* const* x, float* y) {
  constexpr int64_t bytes = 256 / Type::size * Type::bytes;
  __m512 acc[C];
  for (int i = 0; i < C; ++i) {
    acc[i] = _mm512_setzero_ps();
  }
  const FixedBlock* at[C];
  int64_t full = K / 256;
  auto step = [&](const uint8_t* blocks, int64_t b) {
    for (int i = 0; i < C; ++i) {
      at[i] = x[i] + b;
    }
    super_block<Type, C>(blocks, at, acc);
  };
  for (int64_t b = 0; b < full; ++b) {
    const uint8_t* blocks = w + b * bytes;
    // With several rows of x the work between loads is too long for the
    // processor to look ahead by itself.
    for (int64_t line = 0; C > 1 && line < bytes; line += 64) {
      _mm_prefetch(blocks + 1024 + line, _MM_HINT_T0);
    }
    step(blocks, b);
  }
  if (K % 256 && K > 256) {
    step(w + (K - 256) / Type::size * Type::bytes, full);
  } else if (K % 256) {
    alignas(64) uint8_t padded[bytes] = {};
    std::memcpy(padded, w, K / Type::size * Type::bytes);
    step(padded, full);
  }
  for (int i = 0; i < C; ++i) {
    y[i] = sum_lanes(acc[i]);
  }
}

// As gemv, for up to C rows of x. Places past M repeat the last row; their
// results go nowhere.
template <typename Type, int C>
void gemv_columns(
    const uint8_t* w,
    int64_t row_bytes,
    int64_t n,
    int64_t K,
    const void* const* x,
    int64_t M,
    float (*y)[row_group]) {
  const FixedBlock* blocks[C];
  for (int i = 0; i < C; ++i) {
    blocks[i] = static_cast<const FixedBlock*>(x[i < M ? i : M - 1]);
  }
  for (int64_t r = 0; r < n; ++r) {
    float to[C];
    gemv_row<Type, C>(w + r * row_bytes, K, blocks, to);
    for (int64_t i = 0; i < M; ++i) {
      y[i][r] = to[i];
    }
  }
}

template <typename Type>
void gemv(
    const uint8_t* w,
    int64_t row_bytes,
    int64_t n,
    int64_t K,
    const void* const* x,
    int64_t M,
    float (*y)[row_group]) {
  auto run = M == 1   ? gemv_columns<Type, 1>
             : M == 2 ? gemv_columns<Type, 2>
             : M <= 4 ? gemv_columns<Type, 4>
                      : gemv_columns<Type, 8>;
  run(w, row_bytes, n, K, x, M, y);
}

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA
