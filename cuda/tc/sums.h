// What the formats' units add up, on tensor cores with exact products.
#pragma once
#include "columns.h"

// Sums of 16 rows by 8 columns for each tile of columns, as mma() holds them.
template <int TILES>
struct Sums {
  float v[TILES][4];
  DEVICE Sums() {
    UNROLL
    for (int i = 0; i < TILES; ++i) {
      v[i][0] = v[i][1] = v[i][2] = v[i][3] = 0.0f;
    }
  }
};

// 4 weights of rows g and g + 8, as two pairs each.
struct Four {
  uint32_t a0, a1, a2, a3;
};

// One step of depth 16 with half H of a slot.
template <int H, int TILES>
DEVICE void step(Sums<TILES>& sums, const Four& w, const uint4 (&x)[TILES]) {
  UNROLL
  for (int i = 0; i < TILES; ++i) {
    mma(sums.v[i],
        w.a0,
        w.a1,
        w.a2,
        w.a3,
        H ? x[i].z : x[i].x,
        H ? x[i].w : x[i].y);
  }
}

template <int TILES, int SUMMED, bool SCALED>
DEVICE void load_slot(
    const Operand<TILES, SUMMED, SCALED>& x, int pair, uint4 (&slot)[TILES]) {
  UNROLL
  for (int i = 0; i < TILES; ++i) {
    slot[i] = x.slot(pair, i);
  }
}

// Mins times sums of x / sum_unit: pairs of f16 for groups 2 t and 2 t + 1
// of 8.
template <int TILES, int SUMMED, bool SCALED>
DEVICE void add_mins(
    Sums<TILES>& sums,
    const Operand<TILES, SUMMED, SCALED>& x,
    int at,
    uint32_t mins0,
    uint32_t mins1) {
  uint32_t rest0 = mul2(mins0, f16_sum_rest), rest1 = mul2(mins1, f16_sum_rest);
  UNROLL
  for (int i = 0; i < TILES; ++i) {
    uint2 b = x.sums(at, i);
    mma(sums.v[i], mins0, mins1, rest0, rest1, b.x, b.y);
  }
}

// total += scale * sums, the scales those of rows g and g + 8.
template <int TILES>
DEVICE void fold(
    Sums<TILES>& total, const Sums<TILES>& sums, float scale0, float scale1) {
  UNROLL
  for (int i = 0; i < TILES; ++i) {
    total.v[i][0] = fmaf(scale0, sums.v[i][0], total.v[i][0]);
    total.v[i][1] = fmaf(scale0, sums.v[i][1], total.v[i][1]);
    total.v[i][2] = fmaf(scale1, sums.v[i][2], total.v[i][2]);
    total.v[i][3] = fmaf(scale1, sums.v[i][3], total.v[i][3]);
  }
}

// The same with what undoes the scale of a unit's x.
template <int TILES, int SUMMED, bool SCALED>
DEVICE void fold_unit(
    Sums<TILES>& total,
    const Sums<TILES>& sums,
    const Operand<TILES, SUMMED, SCALED>& x,
    float scale0,
    float scale1) {
  UNROLL
  for (int i = 0; i < TILES; ++i) {
    float2 inverse = x.inverse(i); // ones, which cost nothing, unless SCALED
    total.v[i][0] = fmaf(scale0 * inverse.x, sums.v[i][0], total.v[i][0]);
    total.v[i][1] = fmaf(scale0 * inverse.y, sums.v[i][1], total.v[i][1]);
    total.v[i][2] = fmaf(scale1 * inverse.x, sums.v[i][2], total.v[i][2]);
    total.v[i][3] = fmaf(scale1 * inverse.y, sums.v[i][3], total.v[i][3]);
  }
}

// 4 bytes of shared memory at an address that a type's blocks align.
template <int ALIGN>
DEVICE uint32_t load4(const uint8_t* p) {
  if constexpr (ALIGN % 4 == 0) {
    return *(const uint32_t*)p;
  } else if constexpr (ALIGN % 2 == 0) {
    return word((const uint16_t*)p, 0);
  } else {
    return p[0] | p[1] << 8 | p[2] << 16 | uint32_t(p[3]) << 24;
  }
}

// Codes in bytes 0 and 1, or 2 and 3, as f16 numbers 1024 + code, and less a
// bias: exact integers. `magic` is Operand's f16_1024.
constexpr uint32_t minus_1024 = 0xe400e400;
DEVICE uint32_t first_two(uint32_t codes, uint32_t magic, uint32_t bias) {
  return add2(__byte_perm(codes, magic, 0x4140), bias);
}
DEVICE uint32_t last_two(uint32_t codes, uint32_t magic, uint32_t bias) {
  return add2(__byte_perm(codes, magic, 0x4342), bias);
}
DEVICE Four
four(uint32_t codes0, uint32_t codes1, uint32_t magic, uint32_t bias) {
  return {
      first_two(codes0, magic, bias),
      first_two(codes1, magic, bias),
      last_two(codes0, magic, bias),
      last_two(codes1, magic, bias)};
}
