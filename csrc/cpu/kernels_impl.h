// The kernels, written with vectors of 16 floats that the compiler maps to the
// instruction set of the including file (one register with AVX-512, four with
// SSE or NEON).
#pragma once

#include "cpu/decode.h"
#include "cpu/kernels.h"

namespace mlx_gguf::cpu::MLX_GGUF_ISA {
namespace {

constexpr int lanes = x_padding;
typedef float Vec __attribute__((vector_size(lanes * 4), aligned(4)));

Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

void store(float* p, Vec v) {
  std::memcpy(p, &v, sizeof(v));
}

// Always the same tree, so a sum never depends on how it was scheduled.
float sum(const Vec& v) {
  float s[lanes];
  std::memcpy(s, &v, sizeof(s));
  for (int width = lanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) {
      s[i] += s[i + width];
    }
  }
  return s[0];
}

template <typename Type>
void decode(const uint8_t* blocks, int64_t n_blocks, float* out) {
  for (int64_t i = 0; i < n_blocks; ++i) {
    Type::decode(blocks + i * Type::bytes, out + i * Type::size);
  }
}

// acc[m][r] += x[m] * w[r] over n floats, lane by lane, for C rows of x.
template <int C>
void accumulate(
    const float* w,
    const float* const* x,
    int64_t offset,
    int64_t n,
    float* acc) {
  Vec a[C][row_group];
  for (int c = 0; c < C; ++c) {
    for (int r = 0; r < row_group; ++r) {
      a[c][r] = load(acc + (c * row_group + r) * lanes);
    }
  }
  for (int64_t k = 0; k < n; k += lanes) {
    Vec wv[row_group];
    for (int r = 0; r < row_group; ++r) {
      wv[r] = load(w + r * k_tile + k);
    }
    for (int c = 0; c < C; ++c) {
      Vec xv = load(x[c] + offset + k);
      for (int r = 0; r < row_group; ++r) {
        a[c][r] += xv * wv[r];
      }
    }
  }
  for (int c = 0; c < C; ++c) {
    for (int r = 0; r < row_group; ++r) {
      store(acc + (c * row_group + r) * lanes, a[c][r]);
    }
  }
}

template <typename Type>
void product(
    const uint8_t* w,
    int64_t row_bytes,
    int64_t n,
    int64_t K,
    const float* const* x,
    int64_t M,
    float (*y)[row_group],
    float* scratch) {
  float* weights = scratch;                  // [row_group][k_tile]
  float* acc = scratch + row_group * k_tile; // [M][row_group][lanes]
  std::memset(acc, 0, sizeof(float) * M * row_group * lanes);
  for (int64_t k = 0; k < K; k += k_tile) {
    int64_t width = K - k < k_tile ? K - k : k_tile;
    int64_t padded = (width + lanes - 1) / lanes * lanes;
    for (int r = 0; r < row_group; ++r) {
      float* row = weights + r * k_tile;
      if (r < n) {
        const uint8_t* blocks =
            w + r * row_bytes + k / Type::size * int64_t(Type::bytes);
        decode<Type>(blocks, width / Type::size, row);
        std::memset(row + width, 0, sizeof(float) * (padded - width));
      } else if (k == 0) {
        std::memset(row, 0, sizeof(float) * k_tile);
      }
    }
    int64_t m = 0;
    for (; m + 2 <= M; m += 2) {
      accumulate<2>(weights, x + m, k, padded, acc + m * row_group * lanes);
    }
    for (; m < M; ++m) {
      accumulate<1>(weights, x + m, k, padded, acc + m * row_group * lanes);
    }
  }
  for (int64_t m = 0; m < M; ++m) {
    for (int r = 0; r < row_group; ++r) {
      y[m][r] = sum(load(acc + (m * row_group + r) * lanes));
    }
  }
}

template <typename Type>
TypeKernels kernels_of() {
  return {.decode = decode<Type>, .product = product<Type>};
}

template <typename... Types>
TypeKernels find_type(uint32_t id) {
  TypeKernels found{};
  ((Types::id == id ? void(found = kernels_of<Types>()) : void()), ...);
  return found;
}

TypeKernels type(uint32_t id) {
  return find_type<
      F32,
      F16,
      BF16,
      Q4_0,
      Q4_1,
      Q5_0,
      Q5_1,
      Q8_0,
      Q2_K,
      Q3_K,
      Q4_K,
      Q5_K,
      Q6_K,
      IQ4_NL,
      IQ4_XS,
      MXFP4>(id);
}

void to_f32(Number from, const void* src, int64_t n, float* dst) {
  auto half = static_cast<const uint16_t*>(src);
  switch (from) {
    case Number::f16:
      for (int64_t i = 0; i < n; ++i) {
        dst[i] = half_to_float(half[i]);
      }
      break;
    case Number::bf16:
      for (int64_t i = 0; i < n; ++i) {
        dst[i] = bfloat_to_float(half[i]);
      }
      break;
    case Number::f32:
      std::memcpy(dst, src, sizeof(float) * n);
  }
}

void from_f32(Number to, const float* src, int64_t n, void* dst) {
  auto half = static_cast<uint16_t*>(dst);
  switch (to) {
    case Number::f16:
      for (int64_t i = 0; i < n; ++i) {
        half[i] = float_to_half(src[i]);
      }
      break;
    case Number::bf16:
      for (int64_t i = 0; i < n; ++i) {
        half[i] = float_to_bfloat(src[i]);
      }
      break;
    case Number::f32:
      std::memcpy(dst, src, sizeof(float) * n);
  }
}

void axpy(float a, const float* x, int64_t n, float* y) {
  for (int64_t i = 0; i < n; ++i) {
    y[i] += a * x[i];
  }
}

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA
