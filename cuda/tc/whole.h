// What the units of whole numbers add up, on tensor cores with exact sums.
#pragma once
#include "digits.h"
#include "sums.h"

// d = A B + c for 16 rows, 8 columns and a depth of 32 bytes, as mma() but with
// 4 bytes in a register: depths 4 t to 4 t + 3 (a0, a1; b0) and 16 more (a2,
// a3; b1). B is signed, A as KIND says.
struct Unsigned {};
struct Signed {};
#define WHOLE_MMA(KIND, TYPE)                               \
  DEVICE void mma(                                          \
      KIND,                                                 \
      int (&d)[4],                                          \
      uint32_t a0,                                          \
      uint32_t a1,                                          \
      uint32_t a2,                                          \
      uint32_t a3,                                          \
      uint32_t b0,                                          \
      uint32_t b1,                                          \
      const int (&c)[4]) {                                  \
    asm("mma.sync.aligned.m16n8k32.row.col.s32." TYPE       \
        ".s8.s32 {%0, %1, %2, %3}, "                        \
        "{%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};" \
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])    \
        : "r"(a0),                                          \
          "r"(a1),                                          \
          "r"(a2),                                          \
          "r"(a3),                                          \
          "r"(b0),                                          \
          "r"(b1),                                          \
          "r"(c[0]),                                        \
          "r"(c[1]),                                        \
          "r"(c[2]),                                        \
          "r"(c[3]));                                       \
  }
WHOLE_MMA(Unsigned, "u8")
WHOLE_MMA(Signed, "s8")
#undef WHOLE_MMA

// The same for a depth of 16.
DEVICE void mma_half(
    int (&d)[4], uint32_t a0, uint32_t a1, uint32_t b, const int (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, "
      "{%4, %5}, {%6}, {%7, %8, %9, %10};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a0), "r"(a1), "r"(b), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

// Sums of 16 rows by 8 columns for each tile, as mma() holds them.
template <int TILES>
struct Whole {
  int v[TILES][4];
  DEVICE Whole() {
    UNROLL
    for (int i = 0; i < TILES; ++i) {
      v[i][0] = v[i][1] = v[i][2] = v[i][3] = 0;
    }
  }
};

// Half H of a slot times 8 bytes of rows g and g + 8.
template <int H, typename KIND, int TILES>
DEVICE void step(
    KIND kind,
    Whole<TILES>& sums,
    uint2 w0,
    uint2 w1,
    const uint4 (&x)[TILES],
    const Whole<TILES>& from) {
  UNROLL
  for (int i = 0; i < TILES; ++i) {
    mma(kind,
        sums.v[i],
        w0.x,
        w1.x,
        w0.y,
        w1.y,
        H ? x[i].z : x[i].x,
        H ? x[i].w : x[i].y,
        from.v[i]);
  }
}

template <int TILES>
DEVICE void load_slot(
    const WholeOperand<TILES>& x, int pair, uint4 (&slot)[TILES]) {
  UNROLL
  for (int i = 0; i < TILES; ++i) {
    slot[i] = x.slot(pair, i);
  }
}

// total += scale * sums, the scales those of rows g and g + 8.
template <int TILES>
DEVICE void fold(
    Whole<TILES>& total, const Whole<TILES>& sums, int scale0, int scale1) {
  UNROLL
  for (int i = 0; i < TILES; ++i) {
    total.v[i][0] += scale0 * sums.v[i][0];
    total.v[i][1] += scale0 * sums.v[i][1];
    total.v[i][2] += scale1 * sums.v[i][2];
    total.v[i][3] += scale1 * sums.v[i][3];
  }
}

// The same with what undoes the scale of a unit's x.
template <int TILES>
DEVICE void fold_unit(
    Sums<TILES>& total,
    const Sums<TILES>& sums,
    const WholeOperand<TILES>& x,
    float scale0,
    float scale1) {
  float inverse[2] = {x.inverse_of(0), x.inverse_of(1)};
  UNROLL
  for (int i = 0; i < TILES; ++i) {
    UNROLL
    for (int c = 0; c < 4; ++c) {
      float scale = (c < 2 ? scale0 : scale1) * inverse[c % 2];
      total.v[i][c] = fmaf(scale, sums.v[i][c], total.v[i][c]);
    }
  }
}
template <int TILES>
DEVICE Sums<TILES> to_floats(const Whole<TILES>& sums) {
  Sums<TILES> out;
  UNROLL
  for (int i = 0; i < TILES; ++i) {
    UNROLL
    for (int c = 0; c < 4; ++c) {
      out.v[i][c] = float(sums.v[i][c]);
    }
  }
  return out;
}

// Mins times sums of x, which go with the first digit: dmin of rows g and
// g + 8, mins pairs of f16 for groups 2 t and 2 t + 1 of 8.
template <int TILES>
DEVICE void fold_mins(
    Sums<TILES>& total,
    const WholeOperand<TILES>& x,
    uint32_t mins0,
    uint32_t mins1,
    float dmin0,
    float dmin1) {
  uint2 b = x.sums_of();
  float sums[4] = {};
  mma(sums,
      mins0,
      mins1,
      mul2(mins0, f16_sum_rest),
      mul2(mins1, f16_sum_rest),
      b.x,
      b.y);
  UNROLL
  for (int c = 0; c < 4; ++c) {
    if (TILES > 1 || c % 2 == 0) {
      float scale = (c < 2 ? dmin0 : dmin1) * x.min_unit * x.inverse_of(c % 2);
      total.v[0][c] = fmaf(scale, sums[c], total.v[0][c]);
    }
  }
}

// Byte `at` of a word as a number from 0 to 255, or -128 to 127.
DEVICE int unsigned_byte(uint32_t w, int at) {
  return int(__byte_perm(w, 0, 0x4440 + at));
}
DEVICE int signed_byte(uint32_t w, int at) {
  return int(permute(w, w, 0x8880 + 0x1111 * at));
}
// Bits of a where `mask` has them, of b elsewhere. The compiler would take two
// instructions.
DEVICE uint32_t select(uint32_t mask, uint32_t a, uint32_t b) {
  uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(out) : "r"(mask), "r"(a), "r"(b));
  return out;
}
