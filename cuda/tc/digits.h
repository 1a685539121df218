// Rows of x as whole numbers for the integer tensor cores. Every 256 of a row
// are scaled by a power of two, so that their largest lies between 2^20 and
// 2^21, and rounded: exact for an f16 or bf16 of at least 2^-10 of the largest.
// Three digits to the base 256, signed bytes, are columns of their own, so that
// sums of products with bytes of w are exact.
#pragma once
#include "columns.h"

// How a lane's 8 weights of a block of 32, in the order of their numbers, lie
// in the two words of B that it gives to a step: A has w in the same order.
// `apart`: from the first 4 to the others.
struct WholeEights { // lane t has 8 t to 8 t + 7
  static constexpr uint32_t column_bytes = 256;
  static constexpr uint32_t first = 8, apart = 4;
  // Where a lane's of block j lie in a column: the first of lane t and those
  // of a second block, 16 bytes, then the next lane's.
  DEVICE static uint32_t at(uint32_t j, uint32_t t) {
    return 64 * (j / 2) + 16 * t + 8 * (j % 2);
  }
  DEVICE static constexpr int order(int i) {
    return i;
  }
};
struct WholeFours : WholeEights { // 4 t to 4 t + 3 and 16 more
  static constexpr uint32_t first = 4, apart = 16;
  DEVICE static constexpr int order(int i) {
    return i;
  }
};
struct WholePairs : WholeFours { // the same, one of each 4 in turn
  DEVICE static constexpr int order(int i) {
    return i / 2 + 4 * (i % 2);
  }
};
// A row's digits at once, which are on different banks (pairs.h).
template <typename Eights>
struct Spread : Eights {
  static constexpr uint32_t column_bytes = 288;
};
template <typename Eights>
struct InLine : Spread<Eights> { // block by block, lane by lane
  DEVICE static uint32_t at(uint32_t j, uint32_t t) {
    return 32 * j + 8 * t;
  }
};

// The digits of 256 numbers in shared memory: 3 columns, the sums of every 32
// as f16 pairs (columns.h) and what undoes the scale.
template <typename Layout>
struct Digits {
  static constexpr uint32_t count = 3;
  static constexpr uint32_t column_bytes = Layout::column_bytes;
  static constexpr uint32_t sums_at = count * column_bytes;
  static constexpr uint32_t inverse_at = sums_at + 32;
  // 832 for columns of 256, 64 more than a multiple of 128, so that two rows
  // are on different banks.
  static constexpr uint32_t row_bytes = (inverse_at + 4 + 31) / 32 * 32;
};
// Of a sum of whole numbers, to be an f16.
constexpr float whole_sum_unit = 131072.0f;

template <typename T>
struct SixteenBits;
template <>
struct SixteenBits<half_t> {
  static constexpr uint32_t infinite = 0x7c00;
};
template <>
struct SixteenBits<bfloat_t> {
  static constexpr uint32_t infinite = 0x7f80;
};

DEVICE uint32_t max2(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("max.u16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

// 256 numbers of a row of x, which lie where their digits will: a warp's task.
template <typename T, typename Layout, bool SUMMED>
struct WholeTask {
  typedef ::Digits<Layout> Digits;
  static constexpr uint32_t row_bytes = Digits::row_bytes;
  DEVICE static constexpr uint32_t unit_bytes(uint32_t M) {
    return M * row_bytes;
  }
  struct Eight {
    uint2 first, second;
    DEVICE Eight(const uint8_t* row, uint32_t lane) {
      const T* x = (const T*)row + 32 * (lane / 4) + Layout::first * (lane % 4);
      first = *(const uint2*)x;
      second = *(const uint2*)(x + Layout::apart);
    }
  };
  // A function, so that its code is there once.
  __device__ __noinline__ static void put(uint8_t* row, uint32_t lane) {
    Eight eight(row, lane);
    __syncwarp();
    put_row(eight.first, eight.second, row, lane);
  }
  DEVICE static void put2(uint8_t* row, uint8_t* other, uint32_t lane) {
    Eight eight(row, lane), others(other, lane);
    __syncwarp();
    put_row(eight.first, eight.second, row, lane);
    put_row(others.first, others.second, other, lane);
  }
  DEVICE static void put_row(
      uint2 first, uint2 second, uint8_t* row, uint32_t lane) {
    uint32_t two[4] = {first.x, first.y, second.x, second.y};
    uint32_t largest = max2(
        max2(two[0] & 0x7fff7fff, two[1] & 0x7fff7fff),
        max2(two[2] & 0x7fff7fff, two[3] & 0x7fff7fff));
    largest = __reduce_max_sync(~0u, max(largest & 0xffff, largest >> 16));
    uint32_t exponent = __float_as_uint(widen(T{uint16_t(largest)})) >> 23;
    uint32_t field = min(274 - exponent, 253u);
    float scale = as_float(field << 23);
    uint32_t inverse = (254 - field) << 23;
    if (largest >= SixteenBits<T>::infinite) {
      inverse = 0x7fc00000; // NaN
    }
    // 2^23 and 128, 128 and 64 for the digits, whose bytes are read off the
    // bits of the number.
    constexpr float magic = 8388608.0f + 0x408080;
    uint32_t v[8];
    UNROLL
    for (int i = 0; i < 4; ++i) {
      float a, b;
      ::Eight<T>::widen2(T{}, two[i], a, b);
      v[2 * i] = __float_as_uint(fmaf(a, scale, magic));
      v[2 * i + 1] = __float_as_uint(fmaf(b, scale, magic));
    }
    uint32_t j = lane / 4, t = lane % 4;
    if constexpr (SUMMED) {
      uint32_t sum = 0u - 8 * 0x4b408080u;
      UNROLL
      for (int i = 0; i < 8; ++i) {
        sum += v[i];
      }
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      float whole = float(int(sum)) * (1 / whole_sum_unit);
      uint32_t high = to_halves(whole, 0);
      uint32_t low = to_halves((whole - low_half(high)) * sum_rest, 0);
      if (t == 0) {
        uint8_t* to = row + Digits::sums_at + 8 * (j / 2) + 2 * (j % 2);
        *(uint16_t*)to = uint16_t(high);
        *(uint16_t*)(to + 4) = uint16_t(low);
      }
    }
    if (lane == 0) {
      *(uint32_t*)(row + Digits::inverse_at) = inverse;
    }
    uint2 digit[3];
    UNROLL
    for (int half = 0; half < 2; ++half) {
      uint32_t a = v[Layout::order(4 * half)];
      uint32_t b = v[Layout::order(4 * half + 1)];
      uint32_t c = v[Layout::order(4 * half + 2)];
      uint32_t d = v[Layout::order(4 * half + 3)];
      uint32_t ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140);
      uint32_t top = __byte_perm(
          __byte_perm(a, b, 0x0062), __byte_perm(c, d, 0x0062), 0x5410);
      constexpr uint32_t sign = 0x80808080;
      uint32_t words[3] = {
          __byte_perm(ab, cd, 0x5410) ^ sign,
          __byte_perm(ab, cd, 0x7632) ^ sign,
          (top + 0x40404040) ^ sign};
      UNROLL
      for (int i = 0; i < 3; ++i) {
        (half ? digit[i].y : digit[i].x) = words[i];
      }
    }
    row += Layout::at(j, t);
    UNROLL
    for (int i = 0; i < 3; ++i) {
      *(uint2*)(row + i * Digits::column_bytes) = digit[i];
    }
  }
};

// A lane's view of a unit. With one tile of 8 columns it has up to 2 rows of x,
// digit p of row m in column 4 m + p; with 3 tiles up to 8, one digit a tile,
// row m in column m. Columns past the last repeat it; nobody reads what they
// give.
template <int TILES>
struct WholeOperand {
  typedef ::Digits<WholeEights> Digits;
  const uint8_t* unit;
  uint32_t t;
  uint32_t column[TILES]; // where it and the lane's part of it start
  uint32_t sums;
  uint32_t inverse[2]; // of columns 2 t and 2 t + 1, whose results it has
  float min_unit;      // of mins times sums, 0 for columns that are not for it
  uint32_t zero;       // as in Operand, like the next
  uint32_t f16_1024;

  DEVICE WholeOperand(uint32_t M, uint32_t g, uint32_t t) : t(t) {
    zero = (M + g) >> 16;
    f16_1024 = 0x64646464 + zero;
    uint32_t m = min(TILES == 1 ? g / 4 : g, M - 1) * Digits::row_bytes;
    UNROLL
    for (int i = 0; i < TILES; ++i) {
      uint32_t digit = TILES == 1 ? min(g % 4, 2u) : i;
      column[i] = m + digit * Digits::column_bytes + 16 * t;
    }
    sums = m + Digits::sums_at + 8 * t;
    UNROLL
    for (int i = 0; i < 2; ++i) {
      uint32_t mine = TILES == 1 ? t / 2 : 2 * t + i;
      inverse[i] = min(mine, M - 1) * Digits::row_bytes + Digits::inverse_at;
    }
    min_unit = TILES == 1 && t % 2 != 0 ? 0.0f : -whole_sum_unit;
  }
  // B of two steps of depth 32.
  DEVICE uint4 slot(int pair, int tile) const {
    return *(const uint4*)(unit + column[tile] + 64 * pair);
  }
  DEVICE uint2 sums_of() const {
    return *(const uint2*)(unit + sums);
  }
  DEVICE float inverse_of(int i) const {
    return *(const float*)(unit + inverse[TILES == 1 ? 0 : i]);
  }
};
