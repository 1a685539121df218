// Units of the 4-bit types whose codes index a table of 16 values.
#pragma once
#include "sums.h"

// The values plus 128, 4 a word.
struct Iq4Values {
  static constexpr uint32_t v[4] = {
      0x3f2d1801, 0x766a5d4f, 0xa6998d81, 0xf1d9c5b5};
};
struct E2m1Values { // doubled
  static constexpr uint32_t v[4] = {
      0x83828180, 0x8c888684, 0x7d7e7f80, 0x74787a7c};
};

// A lane's copy of the values and of what makes them f16.
template <typename Values>
struct Table {
  uint32_t v[4];
  uint32_t f16_1024;
  template <int TILES, int SUMMED, bool SCALED>
  DEVICE Table(const Operand<TILES, SUMMED, SCALED>& x) : f16_1024(x.f16_1024) {
    UNROLL
    for (int i = 0; i < 4; ++i) {
      v[i] = Values::v[i] + x.zero;
    }
  }
};

// The values of 8 nibbles as f16: low nibbles of a word, then high ones.
template <typename Values>
DEVICE void look_up(
    uint32_t w,
    const Table<Values>& table,
    uint32_t (&low)[2],
    uint32_t (&high)[2]) {
  uint32_t index = w & 0x77777777;
  uint32_t upper = w >> 1 & 0x44444444 | 0x32103210;
  UNROLL
  for (int i = 0; i < 2; ++i) {
    // Low and high nibbles in turn, for two bytes.
    uint32_t four = permute(
        permute(table.v[0], table.v[1], index),
        permute(table.v[2], table.v[3], index),
        upper);
    constexpr uint32_t bias = 0xe480e480; // -(1024 + 128)
    low[i] = add2(__byte_perm(four, table.f16_1024, 0x4240), bias);
    high[i] = add2(__byte_perm(four, table.f16_1024, 0x4341), bias);
    index >>= 16;
    upper >>= 16;
  }
}

// Both rows' words; one step for the low nibbles and one for the high.
template <typename Values, int TILES>
DEVICE void table_steps(
    Sums<TILES>& sums,
    uint32_t w0,
    uint32_t w1,
    const Table<Values>& table,
    const uint4 (&slot)[TILES]) {
  uint32_t low0[2], high0[2], low1[2], high1[2];
  look_up(w0, table, low0, high0);
  look_up(w1, table, low1, high1);
  step<0>(sums, Four{low0[0], low1[0], low0[1], low1[1]}, slot);
  step<1>(sums, Four{high0[0], high1[0], high0[1], high1[1]}, slot);
}

struct TcIQ4_XS {
  static constexpr int block = 256;
  static constexpr int bytes = 136;
  static constexpr int align = 8;
  static constexpr int summed = 0;
  typedef Fours Layout;

  DEVICE static float scale(const uint2& head, int group) {
    uint32_t low = head.y >> (4 * group) & 15;
    uint32_t high = head.x >> (16 + 2 * group) & 3;
    return float(int(low | high << 4) - 32);
  }

  template <int TILES, bool SCALED>
  DEVICE static void unit(
      const uint8_t* r0,
      const uint8_t* r1,
      int,
      const Operand<TILES, summed, SCALED>& x,
      Sums<TILES>& total) {
    uint2 head0 = *(const uint2*)r0, head1 = *(const uint2*)r1;
    Sums<TILES> sums;
    Table<Iq4Values> table(x);
    UNROLL
    for (int b = 0; b < 8; ++b) {
      uint4 slot[TILES];
      load_slot(x, b, slot);
      Sums<TILES> group;
      table_steps(
          group,
          *(const uint32_t*)(r0 + 8 + 16 * b + 4 * x.t),
          *(const uint32_t*)(r1 + 8 + 16 * b + 4 * x.t),
          table,
          slot);
      fold(sums, group, scale(head0, b), scale(head1, b));
    }
    fold_unit(total, sums, x, low_half(head0.x), low_half(head1.x));
  }
};

// 8 blocks of a scale and 16 bytes of codes.
template <typename Values, int SCALE_BYTES>
struct TcTable {
  static constexpr int block_bytes = 16 + SCALE_BYTES;
  static constexpr int block = 32;
  static constexpr int bytes = 8 * block_bytes;
  static constexpr int align = SCALE_BYTES;
  static constexpr int summed = 0;
  typedef Fours Layout;

  DEVICE static float scale(const uint8_t* block) {
    if constexpr (SCALE_BYTES == 2) {
      return half_to_float(*(const uint16_t*)block);
    }
    // 2^(e - 128), below the normal range for e of 0 and 1.
    uint32_t e = block[0];
    return as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
  }

  template <int TILES, bool SCALED>
  DEVICE static void unit(
      const uint8_t* r0,
      const uint8_t* r1,
      int blocks,
      const Operand<TILES, summed, SCALED>& x,
      Sums<TILES>& total) {
    Sums<TILES> sums;
    Table<Values> table(x);
    UNROLL
    for (int b = 0; b < 8; ++b) {
      if (b < blocks) {
        uint4 slot[TILES];
        load_slot(x, b, slot);
        const uint8_t* b0 = r0 + block_bytes * b;
        const uint8_t* b1 = r1 + block_bytes * b;
        Sums<TILES> block;
        table_steps(
            block,
            load4<align>(b0 + SCALE_BYTES + 4 * x.t),
            load4<align>(b1 + SCALE_BYTES + 4 * x.t),
            table,
            slot);
        if constexpr (SCALE_BYTES == 1) {
          // A scale alone may overflow what the scale of x has yet to undo.
          fold_unit(total, block, x, scale(b0), scale(b1));
        } else {
          fold(sums, block, scale(b0), scale(b1));
        }
      }
    }
    if constexpr (SCALE_BYTES != 1) {
      fold_unit(total, sums, x, 1.0f, 1.0f);
    }
  }
};
typedef TcTable<Iq4Values, 2> TcIQ4_NL;
typedef TcTable<E2m1Values, 1> TcMXFP4;
