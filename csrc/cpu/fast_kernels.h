// RMS normalisation, rotary positions and attention for one instruction set, on
// f32 in the vectors of kernels_impl.h. Every sum has one order, so a row's
// result depends on its own values alone.
#pragma once

#include "cpu/fast_delta.h"
#include "cpu/fast_exponentials.h"
#include "cpu/fast_sums.h"

namespace mlx_gguf::cpu::MLX_GGUF_ISA {
namespace {

// Rows by columns whose sums stay in registers.
#ifdef __AVX512F__
constexpr int dot_rows = 4, dot_keys = 4, sum_rows = 4, sum_columns = 4;
#else
constexpr int dot_rows = 2, dot_keys = 2, sum_rows = 4, sum_columns = 1;
#endif

void rms_norm(const float* x, const float* w, float eps, int64_t n, float* y) {
  Vec squares[4] = {};
  int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    for (int j = 0; j < 4; ++j) {
      Vec v = load(x + i + j * lanes);
      squares[j] += v * v;
    }
  }
  float rest = 0.0f;
  for (; i < n; ++i) {
    rest += x[i] * x[i];
  }
  float total =
      sum((squares[0] + squares[1]) + (squares[2] + squares[3])) + rest;
  float factor = 1.0f / __builtin_sqrtf(total / static_cast<float>(n) + eps);
  if (w) {
    for (i = 0; i < n; ++i) {
      y[i] = x[i] * factor * w[i];
    }
  } else {
    for (i = 0; i < n; ++i) {
      y[i] = x[i] * factor;
    }
  }
}

// The angle less the nearest multiple of pi / 2, and that multiple; in double,
// because an angle may be many turns.
void reduce_angles(
    double position, const double* speeds, float* rest, int32_t* quarters) {
  constexpr double to_integer = 0x1.8p52; // leaves an integer in the low bits
  constexpr double quarters_of_one = 0x1.45f306dc9c883p-1; // 2 / pi
  // pi / 2 in two parts; multiples of the first one are exact.
  constexpr double quarter = 0x1.921fb544p0,
                   quarter_rest = 0x1.0b4611a626331p-34;
  for (int i = 0; i < lanes; ++i) {
    double angle = position * speeds[i];
    double shifted = angle * quarters_of_one + to_integer;
    double multiple = shifted - to_integer;
    rest[i] = static_cast<float>(
        (angle - multiple * quarter) - multiple * quarter_rest);
    int64_t bits;
    std::memcpy(&bits, &shifted, sizeof(bits));
    quarters[i] = static_cast<int32_t>(bits);
  }
}

// cos and sin of position * speeds[i]; speeds are padded to whole vectors.
void rotations(
    double position, const double* speeds, int64_t n, float* cos, float* sin) {
  for (int64_t k = 0; k < n; k += lanes) {
    float rest[lanes];
    int32_t quarters[lanes];
    reduce_angles(position, speeds + k, rest, quarters);
    for (int i = 0; i < lanes; ++i) {
      float r = rest[i], r2 = r * r;
      float s = 1.0f / 362880 * r2 - 1.0f / 5040;
      s = (s * r2 + 1.0f / 120) * r2 - 1.0f / 6;
      s = s * r2 * r + r;
      float c = -1.0f / 3628800 * r2 + 1.0f / 40320;
      c = (c * r2 - 1.0f / 720) * r2 + 1.0f / 24;
      c = (c * r2 - 0.5f) * r2 + 1.0f;
      bool odd = quarters[i] & 1;
      float a = odd ? s : c, b = odd ? c : s;
      cos[k + i] = (quarters[i] + 1) & 2 ? -a : a;
      sin[k + i] = quarters[i] & 2 ? -b : b;
    }
  }
}

void rotate(
    const float* __restrict x,
    const float* __restrict cos,
    const float* __restrict sin,
    int64_t half,
    bool traditional,
    float* __restrict y) {
  if (traditional) {
    for (int64_t i = 0; i < half; ++i) {
      float a = x[2 * i], b = x[2 * i + 1];
      y[2 * i] = a * cos[i] - b * sin[i];
      y[2 * i + 1] = a * sin[i] + b * cos[i];
    }
    return;
  }
  for (int64_t i = 0; i < half; ++i) {
    float a = x[i], b = x[i + half];
    y[i] = a * cos[i] - b * sin[i];
    y[i + half] = a * sin[i] + b * cos[i];
  }
}

Vec larger(Vec a, Vec b) {
  return a > b ? a : b;
}

float largest_lane(Vec v) {
  v = larger(
      v,
      __builtin_shufflevector(
          v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = larger(
      v,
      __builtin_shufflevector(
          v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  v = larger(v, swap_twos(v));
  v = larger(v, swap_ones(v));
  return v[0];
}

// out[i * attention_keys + j] = q[i] . k[j] for R rows and K keys.
template <int R, int K>
void dots(const float* q, const float* const* k, int64_t width, float* out) {
  Vec a[R * K] = {};
  for (int64_t d = 0; d < width; d += lanes) {
    Vec kv[K];
    _Pragma("GCC unroll 4") for (int j = 0; j < K; ++j) {
      kv[j] = load(k[j] + d);
    }
    _Pragma("GCC unroll 4") for (int i = 0; i < R; ++i) {
      Vec qv = load(q + i * width + d);
      _Pragma("GCC unroll 4") for (int j = 0; j < K; ++j) {
        a[i * K + j] += qv * kv[j];
      }
    }
  }
  if constexpr (R * K % 4 == 0) {
    for (int i = 0; i < R * K; i += 4) {
      float sums[4];
      four_sums(a + i, sums);
      for (int j = 0; j < 4; ++j) {
        out[(i + j) / K * attention_keys + (i + j) % K] = sums[j];
      }
    }
  } else {
    static_assert(R == 1);
    for (int j = 0; j < K; ++j) {
      out[j] = sum(a[j]);
    }
  }
}

template <int R>
void scores_of_rows(const AttentionBlock& b, int64_t row) {
  for (int64_t j = 0; j < b.keys; j += dot_keys) {
    const float* keys[dot_keys];
    for (int i = 0; i < dot_keys; ++i) { // past the end the last one, again
      int64_t key = j + i < b.keys ? j + i : b.keys - 1;
      keys[i] = b.k + key * b.k_stride;
    }
    dots<R, dot_keys>(
        b.q + row * b.k_width,
        keys,
        b.k_width,
        b.scores + row * attention_keys + j);
  }
}

void attention_scores(const AttentionBlock& b) {
  int64_t row = 0;
  for (; row + dot_rows <= b.rows; row += dot_rows) {
    scores_of_rows<dot_rows>(b, row);
  }
  for (; row < b.rows; ++row) {
    scores_of_rows<1>(b, row);
  }
}

// A row's scores become weights relative to its largest score so far.
void soften(const AttentionBlock& b, int64_t row) {
  constexpr int vectors = attention_keys / lanes;
  constexpr float none = -__builtin_inff();
  float* s = b.scores + row * attention_keys;
  for (int64_t j = b.keys; j < attention_keys; ++j) {
    s[j] = none;
  }
  Vec top = load(s);
  for (int i = 1; i < vectors; ++i) {
    top = larger(load(s + i * lanes), top);
  }
  float before = b.largest[row], now = largest_lane(top);
  now = now > before ? now : before;
  if (now == none) { // nothing but -inf; -inf - -inf would be NaN
    std::memset(s, 0, sizeof(float) * attention_keys);
    return;
  }
  Vec total = {};
  for (int i = 0; i < vectors; ++i) {
    Vec p = exponential(load(s + i * lanes) - splat(now));
    store(s + i * lanes, p);
    total += p;
  }
  if (now != before) {
    float factor = exponential(splat(before - now))[0];
    b.sums[row] *= factor;
    float* out = b.out + row * b.v_width;
    for (int64_t d = 0; d < b.v_width; d += lanes) {
      store(out + d, load(out + d) * splat(factor));
    }
  }
  b.largest[row] = now;
  b.sums[row] += sum(total);
}

// out[i] += sum of weights[i][j] * v[j] for R rows and C vectors of columns.
template <int R, int C>
void add_values(const AttentionBlock& b, int64_t row, int64_t column) {
  float* out = b.out + row * b.v_width + column;
  const float* p = b.scores + row * attention_keys;
  const float* v = b.v + column;
  Vec a[R][C];
  for (int i = 0; i < R; ++i) {
    for (int c = 0; c < C; ++c) {
      a[i][c] = load(out + i * b.v_width + c * lanes);
    }
  }
  for (int64_t j = 0; j < b.keys; ++j) {
    Vec value[C];
    _Pragma("GCC unroll 4") for (int c = 0; c < C; ++c) {
      value[c] = load(v + j * b.v_stride + c * lanes);
    }
    _Pragma("GCC unroll 4") for (int i = 0; i < R; ++i) {
      Vec weight = splat(p[i * attention_keys + j]);
      _Pragma("GCC unroll 4") for (int c = 0; c < C; ++c) {
        a[i][c] += weight * value[c];
      }
    }
  }
  for (int i = 0; i < R; ++i) {
    for (int c = 0; c < C; ++c) {
      store(out + i * b.v_width + c * lanes, a[i][c]);
    }
  }
}

template <int R>
void values_of_rows(const AttentionBlock& b, int64_t row) {
  int64_t column = 0;
  for (; column + sum_columns * lanes <= b.v_width;
       column += sum_columns * lanes) {
    add_values<R, sum_columns>(b, row, column);
  }
  for (; column < b.v_width; column += lanes) {
    add_values<R, 1>(b, row, column);
  }
}

void attention_values(const AttentionBlock& b) {
  for (int64_t row = 0; row < b.rows; ++row) {
    soften(b, row);
  }
  int64_t row = 0;
  for (; row + sum_rows <= b.rows; row += sum_rows) {
    values_of_rows<sum_rows>(b, row);
  }
  for (; row < b.rows; ++row) {
    values_of_rows<1>(b, row);
  }
}

constexpr FastKernels fast{
    rms_norm,
    rotations,
    rotate,
    gate,
    exponentials,
    attention_scores,
    attention_values,
    gated_delta};

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA
