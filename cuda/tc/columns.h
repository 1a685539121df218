// Rows of x as columns of the tensor cores' B operand. An x in f16 goes in as
// it is. Of others every 256 of a row are scaled by a power of two, so that
// their largest lies between 512 and 1024, and become f16: exact for bf16,
// three parts that sum to it for f32. What the scale pushes below f16's range
// is under 2^-34 of the largest.
#pragma once
#include "../common.h"

template <typename T>
struct Parts {
  static constexpr int count = 1;
  static constexpr bool scaled = true;
};
template <>
struct Parts<half_t> {
  static constexpr int count = 1;
  static constexpr bool scaled = false;
};
template <>
struct Parts<float> {
  static constexpr int count = 3;
  static constexpr bool scaled = true;
};

// Which weights a lane has of a unit, so that both operands agree on depth: 16
// bytes of x (a slot: 8 numbers in 2 halves) feed one step's b0 and b1, or two
// steps'. place() gives the slot, as 4 * step pair + t, and half of 4 weights.
struct Place {
  uint32_t slot;
  uint32_t half;
};
// lane t has 8 t to 8 t + 7 of every 32.
struct Eights {
  static constexpr bool swapped = false;
  DEVICE static Place place(uint32_t e) {
    return {4 * (e >> 5) + (e >> 3 & 3), e >> 2 & 1};
  }
};
// The same where masks take bytes 0, 2 and 1, 3 of a word.
struct SwappedEights : Eights {
  static constexpr bool swapped = true;
};
struct Fours { // lane t has 4 t to 4 t + 3 of every 16
  static constexpr bool swapped = false;
  DEVICE static Place place(uint32_t e) {
    return {4 * (e >> 5) + (e >> 2 & 3), e >> 4 & 1};
  }
};

// The x of one unit in shared memory, column by column: slots, sums as f16
// pairs (hi, lo) in the order of B, and what undoes the scale. SUMMED is how
// many weights share a min, 0 for no sums.
//
// Sums are kept times 2^-6, as they may be 32 times as large as an f16, and
// what is left of them times 2^5 (sum_rest more): with an x in f16, whose
// numbers are multiples of 2^-24, the two have 22 bits or all there are.
constexpr float sum_unit = 64.0f;
constexpr float sum_rest = 2048.0f;
constexpr uint32_t f16_sum_rest = 0x10001000; // 1 / sum_rest

template <int SUMMED>
struct Unit {
  static constexpr uint32_t sum_steps = SUMMED ? 32 / SUMMED : 0;
  static constexpr uint32_t sums_at = 512;
  static constexpr uint32_t inverse_at = sums_at + 32 * sum_steps;
  // 64 more than a multiple of 128, so that two columns are on different banks.
  static constexpr uint32_t column_bytes =
      (inverse_at + 4 + 63) / 128 * 128 + 64;
  DEVICE static uint32_t bytes(uint32_t columns) {
    return column_bytes * columns;
  }
};

// 8 numbers of x as they lie in memory, at a multiple of 16 bytes.
template <typename T>
struct Eight {
  uint4 raw;
  DEVICE void load(const T* x) {
    raw = *(const uint4*)x;
  }
  DEVICE void widen(float (&v)[8]) const {
    uint32_t two[4] = {raw.x, raw.y, raw.z, raw.w};
    UNROLL
    for (int i = 0; i < 4; ++i) {
      widen2(T{}, two[i], v[2 * i], v[2 * i + 1]);
    }
  }
  DEVICE static void widen2(half_t, uint32_t two, float& a, float& b) {
    a = low_half(two);
    b = high_half(two);
  }
  DEVICE static void widen2(bfloat_t, uint32_t two, float& a, float& b) {
    a = as_float(two << 16);
    b = as_float(two & 0xffff0000);
  }
};
template <>
struct Eight<float> {
  float4 first, second;
  DEVICE void load(const float* x) {
    first = ((const float4*)x)[0];
    second = ((const float4*)x)[1];
  }
  DEVICE void widen(float (&v)[8]) const {
    v[0] = first.x, v[1] = first.y, v[2] = first.z, v[3] = first.w;
    v[4] = second.x, v[5] = second.y, v[6] = second.z, v[7] = second.w;
  }
};

// The power of two for numbers whose largest magnitude has these bits, and its
// inverse. Infinite and NaN ones pass as they are.
DEVICE void scale_of(uint32_t largest, float& scale, float& inverse) {
  uint32_t exponent = largest >> 23;
  uint32_t field = exponent == 255 ? 127 : min(263 - exponent, 253u);
  scale = as_float(field << 23);
  inverse = as_float((254 - field) << 23);
}

// The sums of a lane's 8 numbers and its neighbours', for the first part's
// column.
template <typename T, int SUMMED>
DEVICE void put_sum(
    const float (&v)[8], uint8_t* column, uint32_t M, uint32_t lane) {
  typedef Unit<SUMMED> U;
  float sum = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
  sum += __shfl_xor_sync(~0u, sum, 1);
  if (SUMMED == 32) {
    sum += __shfl_xor_sync(~0u, sum, 2);
  }
  if (lane % (SUMMED / 8) == 0) {
    uint32_t group = lane / (SUMMED / 8);
    sum *= 1 / sum_unit;
    uint32_t high = to_halves(sum, 0);
    uint32_t low = to_halves((sum - low_half(high)) * sum_rest, 0);
    column +=
        U::sums_at + 32 * (group / 8) + 8 * (group % 8 / 2) + 2 * (group % 2);
    UNROLL
    for (int part = 0; part < Parts<T>::count; ++part) {
      *(uint16_t*)column = part == 0 ? uint16_t(high) : 0;
      *(uint16_t*)(column + 4) = part == 0 ? uint16_t(low) : 0;
      column += M * U::column_bytes;
    }
  }
}

// i / M for the inverse of Params.
DEVICE uint32_t quotient(uint32_t i, uint32_t inverse) {
  return __umulhi(2 * i, inverse);
}

// A warp writes one unit of one row of x: columns m, M + m, ... for its parts.
// `eight` are a lane's numbers. A function, so that its code is there once.
template <typename T, typename Layout, int SUMMED>
__device__ __noinline__ void put_row(
    Eight<T> eight, uint8_t* unit, uint32_t M, uint32_t m, uint32_t lane) {
  typedef Unit<SUMMED> U;
  uint8_t* column = unit + m * U::column_bytes;
  float v[8];
  eight.widen(v);
  if constexpr (Parts<T>::scaled) {
    uint32_t largest = 0;
    UNROLL
    for (int i = 0; i < 8; ++i) {
      largest = max(largest, __float_as_uint(v[i]) & 0x7fffffff);
    }
    largest = __reduce_max_sync(~0u, largest);
    float scale, inverse;
    scale_of(largest, scale, inverse);
    UNROLL
    for (int i = 0; i < 8; ++i) {
      v[i] *= scale;
    }
    if (lane < Parts<T>::count) {
      *(float*)(column + lane * M * U::column_bytes + U::inverse_at) = inverse;
    }
  }
  if constexpr (SUMMED != 0) {
    put_sum<T, SUMMED>(v, column, M, lane);
  }
  Place first = Layout::place(8 * lane), second = Layout::place(8 * lane + 4);
  UNROLL
  for (int part = 0; part < Parts<T>::count; ++part) {
    uint32_t a = to_halves(v[0], v[1]), b = to_halves(v[2], v[3]);
    uint32_t c = to_halves(v[4], v[5]), d = to_halves(v[6], v[7]);
    if (part + 1 < Parts<T>::count) {
      v[0] -= low_half(a), v[1] -= high_half(a), v[2] -= low_half(b),
          v[3] -= high_half(b);
      v[4] -= low_half(c), v[5] -= high_half(c), v[6] -= low_half(d),
          v[7] -= high_half(d);
    }
    uint2 one = make_uint2(a, b), two = make_uint2(c, d);
    if (Layout::swapped) {
      one = make_uint2(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
      two = make_uint2(__byte_perm(c, d, 0x5410), __byte_perm(c, d, 0x7632));
    }
    *(uint2*)(column + 16 * first.slot + 8 * first.half) = one;
    *(uint2*)(column + 16 * second.slot + 8 * second.half) = two;
    column += M * U::column_bytes;
  }
}

// All warps write `count` units of M rows of x, from weight k on. The first
// loads can be made before others queue up in front of them.
template <typename T, typename Layout, int SUMMED, int AHEAD>
struct Columns {
  const T* x; // [M, K]
  uint32_t k;
  uint32_t tasks; // a unit of a row each
  uint32_t M;
  uint32_t K;
  uint32_t inverse;
  uint32_t warp;
  uint32_t warps;
  Eight<T> loaded[AHEAD];

  DEVICE Columns(
      const T* x,
      uint32_t k,
      uint32_t count,
      const Params& p,
      uint32_t warp,
      uint32_t warps)
      : x(x),
        k(k),
        tasks(count * p.M),
        M(p.M),
        K(p.K),
        inverse(p.inverse),
        warp(warp),
        warps(warps) {
    load(warp);
  }
  DEVICE void load(uint32_t first) {
    UNROLL
    for (int i = 0; i < AHEAD; ++i) {
      uint32_t task = first + i * warps;
      loaded[i] = {};
      if (task < tasks) {
        uint32_t u = quotient(task, inverse);
        uint32_t at = k + 256 * u + threadIdx.x % 32 * 8;
        if (at < K) { // a multiple of 32
          loaded[i].load(x + uint64_t(task - u * M) * K + at);
        }
      }
    }
  }
  DEVICE void put(uint8_t* held) {
    uint32_t first = warp;
    while (true) {
      UNROLL
      for (int i = 0; i < AHEAD; ++i) {
        uint32_t task = first + i * warps;
        if (task < tasks) {
          uint32_t u = quotient(task, inverse);
          uint8_t* unit =
              held + u * (Unit<SUMMED>::column_bytes * Parts<T>::count * M);
          put_row<T, Layout, SUMMED>(
              loaded[i], unit, M, task - u * M, threadIdx.x % 32);
        }
      }
      first += AHEAD * warps;
      if (first >= tasks) {
        return;
      }
      load(first);
    }
  }
};

// 256 numbers of a row of x, which lie where their column will: a warp's task.
template <typename T, typename Layout, int SUMMED>
struct HalfTask {
  static_assert(Parts<T>::count == 1, "one column a row");
  static constexpr uint32_t row_bytes = Unit<SUMMED>::column_bytes;
  DEVICE static constexpr uint32_t unit_bytes(uint32_t M) {
    return M * row_bytes;
  }
  DEVICE static void put(uint8_t* row, uint32_t lane) {
    Eight<T> eight;
    eight.load((const T*)row + 8 * lane);
    __syncwarp();
    put_row<T, Layout, SUMMED>(eight, row, 1, 0, lane);
  }
};

// A lane's view of a unit: the B operands of its column of every 8. Columns
// past the last repeat it; nobody reads what they give.
template <int TILES, int SUMMED, bool SCALED>
struct Operand {
  typedef Unit<SUMMED> U;
  const uint8_t* unit;
  uint32_t t;
  uint32_t column[TILES]; // where it starts
  uint32_t first[TILES];  // and columns 2 t and 2 t + 1, whose results it has
  uint32_t second[TILES];
  // Bytes above codes and scales, which read as f16 and f32 numbers then. As
  // the compiler cannot know them they stay in registers; it would make
  // constants again for every permutation.
  uint32_t zero; // added to other constants for the same reason
  uint32_t f16_1024;
  uint32_t f32_magic; // 2^23 and what its last byte says

  DEVICE Operand(uint32_t columns, uint32_t g, uint32_t t) : t(t) {
    zero = (columns + g) >> 16;
    f16_1024 = 0x64646464 + zero;
    f32_magic = 0x4b000000 + zero;
    UNROLL
    for (int i = 0; i < TILES; ++i) {
      column[i] = min(8 * i + g, columns - 1) * U::column_bytes;
      first[i] = min(8 * i + 2 * t, columns - 1) * U::column_bytes;
      second[i] = min(8 * i + 2 * t + 1, columns - 1) * U::column_bytes;
    }
  }
  DEVICE uint4 slot(int pair, int tile) const {
    return *(const uint4*)(unit + column[tile] + 16 * t + 64 * pair);
  }
  DEVICE uint2 sums(int step, int tile) const {
    return *(const uint2*)(unit + column[tile] + 8 * t + U::sums_at +
                           32 * step);
  }
  DEVICE float2 inverse(int tile) const {
    if constexpr (!SCALED) {
      return make_float2(1.0f, 1.0f);
    }
    return make_float2(
        *(const float*)(unit + first[tile] + U::inverse_at),
        *(const float*)(unit + second[tile] + U::inverse_at));
  }
};
