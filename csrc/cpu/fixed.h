// Rows of x in fixed point, so that products with whole codes are sums of whole
// numbers: 16 bits with one power of two for 256 values, and 15 more where 16
// are not as exact as asked for.
#pragma once

#include <type_traits>

#include "cpu/kernels_impl.h"
#include "cpu/products.h"

namespace mlx_gguf::cpu::MLX_GGUF_ISA {
namespace {

// A row of x: blocks of 256 values, x = (high + low / 2^15) * scale. Words lie
// as codes.h orders the bytes of a type, 64 at a time, as products.h lays them.
// Each array is aligned to 64 bytes.
struct FixedRow {
  int64_t n;     // blocks
  int16_t* high; // [n][256]
  int16_t* low;  // [n][256]: zeros where not fine
  float* sums16; // [n][16]: of x, as rounded, over 16 consecutive values
  float* sums32; // [n][8], and some zeros: over 32
  float* scales; // [n]
  int32_t* fine; // [n]: low is in use

  FixedRow(const void* memory, int64_t K) : n((K + 255) / 256) {
    auto at = static_cast<char*>(const_cast<void*>(memory));
    auto take = [&](auto*& array, int64_t count) {
      array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(at);
      at += (count * int64_t(sizeof(*array)) + 63) / 64 * 64;
    };
    take(high, n * 256);
    take(low, n * 256);
    take(sums16, n * 16);
    take(sums32, (n + 1) * 8);
    take(scales, n + 15);
    take(fine, n);
  }
};

constexpr float low_unit = 1.0f / 32768;

int64_t fixed_bytes(int64_t K) {
  int64_t n = (K + 255) / 256;
  return n * (2 * 512 + 64 + 32 + 4 + 4) + 32 + 60 + 4 * 63;
}

// A block whose largest value lies outside has no useful power of two.
constexpr float smallest = 1e-20f, largest = 1e37f;

typedef int32_t WholeVec __attribute__((vector_size(lanes * 4)));
typedef int16_t WordVec __attribute__((vector_size(lanes * 2)));

inline Vec all_lanes(float v) {
  return Vec{} + v;
}

// |v| is below 2^22.
inline Vec rounded(Vec v) {
  const Vec magic = all_lanes(12582912.0f); // 1.5 * 2^23
  return (v + magic) - magic;
}

// Whole numbers to words.
inline void store_whole(int16_t* to, Vec v) {
  WordVec words =
      __builtin_convertvector(__builtin_convertvector(v, WholeVec), WordVec);
  std::memcpy(to, &words, sizeof(words));
}

inline void fix_block(
    const float* x,
    const uint8_t* order,
    float most,
    const FixedRow& out,
    int64_t b) {
  int exponent;
  __builtin_frexpf(most, &exponent);
  int shift = most == 0 ? 0 : 15 - exponent;
  if (__builtin_ldexpf(most, shift) > largest_word) {
    --shift;
  }
  float up = __builtin_ldexpf(1.0f, shift),
        down = __builtin_ldexpf(1.0f, -shift);
  float low_steps = out.fine[b] ? 32768 : 0;
  alignas(64) int16_t high[256], low[256];
  alignas(64) float whole[256];
  for (int i = 0; i < 256; i += lanes) {
    Vec v = load(x + i) * up;
    Vec n = rounded(v);
    Vec rest = rounded((v - n) * low_steps);
    store_whole(high + i, n);
    store_whole(low + i, rest);
    store(whole + i, n + rest * low_unit);
  }
  float* sums = out.sums16 + 16 * b;
  for (int g = 0; g < 16; ++g) {
    sums[g] = sum_lanes(fold(load_floats(whole + 16 * g))) * down;
  }
  for (int g = 0; g < 8; ++g) {
    out.sums32[8 * b + g] = sums[2 * g] + sums[2 * g + 1];
  }
  for (int i = 0; i < 16; ++i) {
    int64_t to = 256 * b + i / 4 * 64;
    store_run(high + 16 * order[i], out.high + to, i % 4);
    store_run(low + 16 * order[i], out.low + to, i % 4);
  }
  out.scales[b] = down;
}

// The largest magnitude, or NaN if one is infinite or NaN itself; the sum of
// squares; and that of what 16 bits round off, both in units of the largest.
struct Measure {
  float most;
  float squares;
  float lost;
};

inline Measure measure(const float* x) {
  Vec most = {}, bad = {};
  for (int i = 0; i < 256; i += lanes) {
    Vec v = load(x + i);
    Vec size = v < 0.0f ? -v : v;
    most = size > most ? size : most;
    bad += v * 0.0f; // 0 but for infinities and NaN
  }
  float all = 0;
  for (int j = 0; j < lanes; ++j) {
    all = most[j] > all ? most[j] : all;
  }
  all += sum(bad);
  if (!(all >= smallest && all <= largest)) {
    return {all, 0, 0};
  }
  int exponent;
  __builtin_frexpf(all, &exponent);
  float unit = __builtin_ldexpf(1.0f, -exponent);
  float steps =
      __builtin_ldexpf(all, 15 - exponent) > largest_word ? 16384 : 32768;
  Vec squares = {}, lost = {};
  for (int i = 0; i < 256; i += lanes) {
    Vec v = load(x + i) * unit;
    Vec r = v * steps - rounded(v * steps);
    squares += v * v;
    lost += r * r;
  }
  return {all, sum(squares), sum(lost) / (steps * steps)};
}

// Fills a FixedRow, or returns false if x has values that fixed point does not
// hold. What does not fill a block lies at the end of one, behind zeros:
// products then read the row's last 256 weights, some for the second time. A
// row shorter than a block lies at its start.
//
// A block keeps 31 bits unless what 16 lose is below `tolerance` of the block
// or of an average block of the row: outliers do not drown the others.
bool fix(
    const float* x,
    int64_t K,
    const uint8_t* order,
    float tolerance,
    void* out) {
  FixedRow row(out, K);
  alignas(64) float tail[256];
  auto block = [&](int64_t b) -> const float* {
    int64_t left = K - b * 256;
    if (left >= 256) {
      return x + b * 256;
    }
    std::memset(tail, 0, sizeof(tail));
    float* to = K > 256 ? tail + 256 - left : tail;
    std::memcpy(to, x + b * 256, sizeof(float) * left);
    return tail;
  };
  double squares = 0;
  auto unit = [](float most) {
    int exponent;
    __builtin_frexpf(most, &exponent);
    return __builtin_ldexp(1.0, exponent);
  };
  // sums16 hold what was measured until the block is written.
  for (int64_t b = 0; b < row.n; ++b) {
    Measure m = measure(block(b));
    if (!(m.most == 0 || (m.most >= smallest && m.most <= largest))) {
      return false;
    }
    double u = unit(m.most);
    squares += m.squares * u * u;
    std::memcpy(row.sums16 + 16 * b, &m, sizeof(m));
  }
  double average = squares / static_cast<double>(row.n);
  for (int64_t b = 0; b < row.n; ++b) {
    Measure m;
    std::memcpy(&m, row.sums16 + 16 * b, sizeof(m));
    double u = unit(m.most), own = m.squares * u * u;
    double allowed =
        double(tolerance) * tolerance * __builtin_fmax(own, average);
    row.fine[b] = m.lost * u * u > allowed;
    fix_block(block(b), order, m.most, row, b);
  }
  std::memset(row.sums32 + 8 * row.n, 0, 8 * sizeof(float));
  return true;
}

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA
