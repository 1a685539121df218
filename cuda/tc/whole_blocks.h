// Units of Q8_0 and IQ4_XS in whole numbers.
#pragma once
#include "tables.h"
#include "whole_kquants.h"

template <>
struct WholeUnit<TcQ8_0> {
  typedef WholeEights Layout;

  template <int TILES>
  DEVICE static void unit(
      const uint8_t* r0,
      const uint8_t* r1,
      int blocks,
      const WholeOperand<TILES>& x,
      Sums<TILES>& total) {
    // Sums from here read as floats: 3 * 2^22 more than they are.
    Whole<TILES> magic, group;
    UNROLL
    for (int i = 0; i < TILES; ++i) {
      UNROLL
      for (int c = 0; c < 4; ++c) {
        magic.v[i][c] = 0x4b400000 + x.zero;
      }
    }
    Sums<TILES> sums;
    auto add = [&](int b, const uint4(&slot)[TILES]) {
      const uint8_t *b0 = r0 + 34 * b, *b1 = r1 + 34 * b;
      const uint8_t *q0 = b0 + 2 + 8 * x.t, *q1 = b1 + 2 + 8 * x.t;
      uint2 w0 = make_uint2(load4<2>(q0), load4<2>(q0 + 4));
      uint2 w1 = make_uint2(load4<2>(q1), load4<2>(q1 + 4));
      if (b % 2 == 0) {
        step<0>(Signed{}, group, w0, w1, slot, magic);
      } else {
        step<1>(Signed{}, group, w0, w1, slot, magic);
      }
      // The last unit of a row may have fewer blocks; past them x is 0.
      float d0 = b < blocks ? half_to_float(*(const uint16_t*)b0) : 0.0f;
      float d1 = b < blocks ? half_to_float(*(const uint16_t*)b1) : 0.0f;
      UNROLL
      for (int i = 0; i < TILES; ++i) {
        UNROLL
        for (int c = 0; c < 4; ++c) {
          float whole = as_float(group.v[i][c]) - 12582912.0f;
          sums.v[i][c] = fmaf(c < 2 ? d0 : d1, whole, sums.v[i][c]);
        }
      }
    };
    UNROLL
    for (int pair = 0; pair < 4; ++pair) {
      uint4 slot[TILES];
      load_slot(x, pair, slot);
      add(2 * pair, slot);
      add(2 * pair + 1, slot);
    }
    fold_unit(total, sums, x, 1.0f, 1.0f);
  }
};

template <>
struct WholeUnit<TcIQ4_XS> {
  typedef WholePairs Layout;

  // A nibble of a selector takes the byte that its 3 low bits say, or with its
  // high bit 8 times the sign of that byte: the first half of the table, all
  // negative, gives -1 for codes of the second, which is made up for there,
  // while the second half, not negative, gives 0 for codes of the first.
  struct Table {
    uint32_t v[4];
    uint32_t half; // 2^16, as a factor: the shifter is busier than multipliers
    DEVICE explicit Table(uint32_t zero) {
      half = 0x10000 + zero;
      v[0] = 0xbfad9881 + zero; // -127 -104 -83 -65
      v[1] = 0xf6eaddcf + zero; // -49 -35 -22 -10
      v[2] = 0x271a0e02 + zero; // 1 13 25 38, and 1 each
      v[3] = 0x725a4636 + zero; // 53 69 89 113
    }
    // 8 codes' values, to be added up, low and high nibbles in turn.
    DEVICE void look_up(uint32_t w, uint2& first, uint2& second) const {
      uint32_t flipped = w ^ 0x88888888;
      first = make_uint2(
          permute(v[0], v[1], w), permute(v[0], v[1], __umulhi(w, half)));
      second = make_uint2(
          permute(v[2], v[3], flipped),
          permute(v[2], v[3], __umulhi(flipped, half)));
    }
  };
  // 4 (scale - 32) of even and odd groups, a byte each.
  DEVICE static void scales(uint2 head, uint32_t& even, uint32_t& odd) {
    uint32_t high = head.x >> 16;
    high = (high | high << 8) & 0x00ff00ff;
    high = ((high | high << 4) & 0x0f0f0f0f) ^ 0x0a0a0a0a;
    even = head.y << 2 & 0x3c3c3c3c | high << 6 & 0xc0c0c0c0;
    odd = head.y >> 2 & 0x3c3c3c3c | high << 4 & 0xc0c0c0c0;
  }

  template <int TILES>
  DEVICE static void unit(
      const uint8_t* r0,
      const uint8_t* r1,
      int,
      const WholeOperand<TILES>& x,
      Sums<TILES>& total) {
    uint2 head0 = *(const uint2*)r0, head1 = *(const uint2*)r1;
    uint32_t scales0[2], scales1[2];
    scales(head0, scales0[0], scales0[1]);
    scales(head1, scales1[0], scales1[1]);
    Table table(x.zero);
    Whole<TILES> sums, group;
    UNROLL
    for (int b = 0; b < 8; ++b) {
      uint4 slot[TILES];
      load_slot(x, b / 2, slot);
      uint2 a0, b0, a1, b1;
      table.look_up(*(const uint32_t*)(r0 + 8 + 16 * b + 4 * x.t), a0, b0);
      table.look_up(*(const uint32_t*)(r1 + 8 + 16 * b + 4 * x.t), a1, b1);
      if (b % 2 == 0) {
        step<0>(Signed{}, group, a0, a1, slot, Whole<TILES>());
        step<0>(Signed{}, group, b0, b1, slot, group);
      } else {
        step<1>(Signed{}, group, a0, a1, slot, Whole<TILES>());
        step<1>(Signed{}, group, b0, b1, slot, group);
      }
      fold(
          sums,
          group,
          signed_byte(scales0[b % 2], b / 2),
          signed_byte(scales1[b % 2], b / 2));
    }
    fold_unit(
        total,
        to_floats(sums),
        x,
        low_half(head0.x) / 4,
        low_half(head1.x) / 4);
  }
};
