// Rows of x in fixed point, so that products with whole codes are sums of whole
// numbers: 16 bits with one power of two for 256 values, and 8 or 15 more where
// 16 are not as exact as asked for.
#pragma once

#include <type_traits>

#include "cpu/kernels_impl.h"
#include "cpu/products.h"

namespace mlx_gguf::cpu::MLX_GGUF_ISA {
namespace {

// How a block of x lies: as words, with low words beside them where it is fine;
// or each of them as a plane of high bytes and one of low bytes, all with
// signs. Of three planes the last is that of 8 low bits.
enum class Way : int32_t { words, fine_words, planes2, planes3, planes4 };

constexpr int planes_of(Way way) {
  return way < Way::planes2 ? 0 : static_cast<int>(way);
}

constexpr bool is_fine(Way way) {
  return way == Way::fine_words || planes_of(way) > 2;
}

// The way of a block with 0, 8 or 15 low bits.
constexpr Way way_with(int low_bits, bool in_planes) {
  if (in_planes) {
    return low_bits == 0   ? Way::planes2
           : low_bits == 8 ? Way::planes3
                           : Way::planes4;
  }
  return low_bits ? Way::fine_words : Way::words;
}

// A row of x: blocks of 256 values, x = (high + low / 2^15) * scale (2^8 in
// three planes). Words lie as codes.h orders the bytes of a type, 64 at a time,
// as products.h lays them; in planes, bytes lie as those of a type. Each array
// is aligned to 64 bytes.
struct FixedRow {
  int64_t n;     // blocks
  int16_t* high; // [n][256], or [n][2][256] bytes
  int16_t* low;  // the same; zeros in words that are not fine
  float* sums16; // [n][16]: of x, as rounded, over 16 consecutive values
  float* sums32; // [n][8], and some zeros: over 32
  float* scales; // [n]
  Way* way;      // [n]
  // [n][2][2][16]: what the bias of the first and last 128 codes comes to in
  // the sums of high and of low words, where those start at it; of whole scales
  // the first is that of all codes.
  int32_t* starts;

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
    take(way, n);
    take(starts, n * 64);
  }
  // Of two planes of a block the first, 256 bytes before the second.
  static const int8_t* planes_at(const int16_t* words, int64_t b) {
    return reinterpret_cast<const int8_t*>(words + 256 * b);
  }
};

constexpr float low_unit = 1.0f / 32768;

int64_t fixed_bytes(int64_t K) {
  int64_t n = (K + 255) / 256;
  return n * (2 * 512 + 64 + 32 + 4 + 4 + 256) + 32 + 60 + 5 * 63;
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

// 16 words to two planes; of words that are bytes the second one is used.
inline void store_bytes(const int16_t* from, int8_t* high) {
  for (int i = 0; i < 16; ++i) {
    auto low = static_cast<int8_t>(from[i]);
    high[i] = static_cast<int8_t>((from[i] - low) >> 8);
    high[256 + i] = low;
  }
}

// Where sums over 128 codes start, 16 lanes of four codes each.
inline void find_starts(
    const int16_t* words, const uint8_t* order, int bias, int32_t* out) {
  int32_t fours[64];
  for (int i = 0; i < 64; ++i) {
    fours[i] =
        words[4 * i] + words[4 * i + 1] + words[4 * i + 2] + words[4 * i + 3];
  }
  for (int i = 0; i < 4; ++i) {
    const int32_t* first = fours + 4 * order[i];
    const int32_t* second = fours + 4 * order[4 + i];
    for (int j = 0; j < 4; ++j) {
      out[4 * i + j] = -bias * (first[j] + second[j]);
    }
  }
}

inline void fix_block(
    const float* x,
    const TypeKernels& type,
    float most,
    int low_bits,
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
  float low_steps = low_bits ? 1 << low_bits : 0;
  float rest_unit = 1.0f / (1 << low_bits);
  float low_value = out.way[b] == Way::planes3 ? 1 : 1 << (15 - low_bits);
  float most_rest = low_bits ? (1 << (low_bits - 1)) - 1 : 0;
  alignas(64) int16_t high[256], low[256];
  alignas(64) float whole[256];
  for (int i = 0; i < 256; i += lanes) {
    Vec v = load(x + i) * up;
    Vec n = rounded(v);
    Vec rest = rounded((v - n) * low_steps);
    rest = rest > most_rest ? all_lanes(most_rest) : rest;
    store_whole(high + i, n);
    store_whole(low + i, rest * low_value);
    store(whole + i, n + rest * rest_unit);
  }
  float* sums = out.sums16 + 16 * b;
  for (int g = 0; g < 16; ++g) {
    sums[g] = sum_lanes(fold(load_floats(whole + 16 * g))) * down;
  }
  for (int g = 0; g < 8; ++g) {
    out.sums32[8 * b + g] = sums[2 * g] + sums[2 * g + 1];
  }
  // Words of a row that is not fine may meet weights beside one that is.
  bool has_low = out.way[b] != Way::planes2;
  const uint8_t* order = type.order;
  for (int half = 0; half < 2 && type.bias; ++half) {
    int32_t* starts = out.starts + 64 * b + 32 * half;
    find_starts(high, order + 8 * half, type.bias, starts);
    if (has_low) {
      find_starts(low, order + 8 * half, type.bias, starts + 16);
    }
  }
  int of_all = !type.bias_of_all ? 0 : has_low ? 32 : 16;
  for (int i = 0; i < of_all; ++i) {
    out.starts[64 * b + i] += out.starts[64 * b + 32 + i];
  }
  for (int i = 0; i < 16; ++i) {
    auto store = [&](const int16_t* from, int16_t* to) {
      to += 256 * b;
      if (planes_of(out.way[b])) {
        store_bytes(
            from + 16 * order[i], reinterpret_cast<int8_t*>(to) + 16 * i);
      } else {
        store_run(from + 16 * order[i], to + i / 4 * 64, i % 4);
      }
    };
    store(high, out.high);
    if (has_low) {
      store(low, out.low);
    }
  }
  out.scales[b] = down;
}

// The largest magnitude, or NaN if one is infinite or NaN itself; the sum of
// squares; and that of what 16 bits round off, both in units of the largest.
struct Measure {
  float most;
  float squares;
  float lost;
  float step; // of 16 bits
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
    return {all, 0, 0, 0};
  }
  int exponent;
  __builtin_frexpf(all, &exponent);
  float unit = __builtin_ldexpf(1.0f, -exponent);
  bool too_large = __builtin_ldexpf(all, 15 - exponent) > largest_word;
  float steps = too_large ? 16384 : 32768;
  Vec squares = {}, lost = {};
  for (int i = 0; i < 256; i += lanes) {
    Vec v = load(x + i) * unit;
    Vec r = v * steps - rounded(v * steps);
    squares += v * v;
    lost += r * r;
  }
  // Steps of twice the size are exact or too large.
  float all_lost = sum(lost) / (steps * steps);
  all_lost = too_large && all_lost > 0 ? 1 : all_lost;
  return {all, sum(squares), all_lost, 1 / steps};
}

// Fills a FixedRow, or returns false if x has values that fixed point does not
// hold. What does not fill a block lies at the end of one, behind zeros:
// products then read the row's last 256 weights, some for the second time. A
// row shorter than a block lies at its start.
//
// A block has the fewest bits of 16, 24 and 31 that lose less than `tolerance`
// of the block or of an average block of the row: outliers do not drown the
// others.
bool fix(
    const float* x,
    int64_t K,
    const TypeKernels& type,
    float tolerance,
    bool in_planes,
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
    // Of 24 bits the most that they may lose on average.
    double step = m.step / 256 * u, most_lost = 256 * step * step / 12;
    int low_bits = m.lost * u * u <= allowed ? 0
                   : most_lost <= allowed    ? 8
                                             : 15;
    row.way[b] = way_with(low_bits, in_planes);
    fix_block(block(b), type, m.most, low_bits, row, b);
  }
  std::memset(row.sums32 + 8 * row.n, 0, 8 * sizeof(float));
  return true;
}

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA
