// Units of Q8_0 and IQ4_XS in whole numbers.
#pragma once
#include "tables.h"
#include "whole_kquants.h"

template <>
struct WholeUnit<TcQ8_0> {
  typedef WholeEights Layout;
  static constexpr bool paired = false;

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
  static constexpr bool paired = true;
  static constexpr bool halves = false;
  typedef InLine<WholePairs> PairLayout;

  // A nibble of a selector takes the byte that its 3 low bits say, or with its
  // high bit 8 times the sign of that byte: the first half of the table, all
  // negative, gives -1 for codes of the second, which is made up for there,
  // while the second half, not negative, gives 0 for codes of the first. What
  // is left of 15 selects from it, from its end: a subtraction, which is twice
  // as fast as logic.
  struct Table {
    uint32_t v[4];
    DEVICE explicit Table(uint32_t zero) {
      v[0] = 0xbfad9881 + zero; // -127 -104 -83 -65
      v[1] = 0xf6eaddcf + zero; // -49 -35 -22 -10
      v[2] = 0x36465a72 + zero; // 113 89 69 53, and 1 each
      v[3] = 0x020e1a27 + zero; // 38 25 13 1
    }
    // 8 codes' values, to be added up, low and high nibbles in turn.
    DEVICE void look_up(uint32_t w, uint2& first, uint2& second) const {
      uint32_t high = w >> 16;
      first = make_uint2(permute(v[0], v[1], w), permute(v[0], v[1], high));
      second = make_uint2(
          permute(v[2], v[3], rest(w)), permute(v[2], v[3], rest(high)));
    }
    DEVICE static uint32_t rest(uint32_t codes) {
      uint32_t out;
      asm("sub.s32 %0, -1, %1;" : "=r"(out) : "r"(codes));
      return out;
    }
  };
  // 4 (scale - 32) of a lane's own groups, a byte each: the even or the odd
  // ones.
  struct Lane {
    Table table;
    uint32_t low, high, odd_high; // how far to turn
    DEVICE explicit Lane(uint32_t t) : table(0) {
      low = kept(t >= 2 ? 30 : 2);
      high = kept(t >= 2 ? 4 : 6);
      odd_high = kept(t >= 2 ? 0 : 2);
    }
    DEVICE uint32_t scales(uint2 head) const {
      // Two bits of 4 groups in every byte.
      uint32_t bits = __byte_perm(head.x, 0, 0x3322);
      uint32_t out = __funnelshift_l(bits, bits, high) & 0x00c000c0;
      out ^= __funnelshift_l(bits, bits, odd_high) & 0xc000c000 ^ 0x80808080;
      return out | __funnelshift_l(head.y, head.y, low) & 0x3c3c3c3c;
    }
  };

  DEVICE static void unit(
      const uint8_t* r0,
      const uint8_t* r1,
      int,
      const PairOperand<WholeUnit>& x,
      Sums<1>& total) {
    uint2 head0 = *(const uint2*)r0, head1 = *(const uint2*)r1;
    const Table& table = x.lane.table;
    uint32_t scales0 = x.lane.scales(head0), scales1 = x.lane.scales(head1);
    r0 += x.t8, r1 += x.t8;
    Whole<1> sums;
    UNROLL
    for (int pair = 0; pair < 4; ++pair) {
      uint2 w0 = *(const uint2*)(r0 + 8 + 32 * pair);
      uint2 w1 = *(const uint2*)(r1 + 8 + 32 * pair);
      uint4 b = x.slot(pair);
      uint2 first0, second0, first1, second1;
      Whole<1> group;
      table.look_up(w0.x, first0, second0);
      table.look_up(w1.x, first1, second1);
      pair_step(Signed{}, group, first0, first1, b.x, b.y, Whole<1>());
      pair_step(Signed{}, group, second0, second1, b.x, b.y, group);
      table.look_up(w0.y, first0, second0);
      table.look_up(w1.y, first1, second1);
      pair_step(Signed{}, group, first0, first1, b.z, b.w, group);
      pair_step(Signed{}, group, second0, second1, b.z, b.w, group);
      fold(sums, group, signed_byte(scales0, pair), signed_byte(scales1, pair));
    }
    unite(sums, x, 1);
    float d = low_half(x.own(head0.x, head1.x)) / 4;
    fold_pairs(total, sums, x, d);
  }

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
