// Units of Q4_K, Q5_K and Q6_K in whole numbers: codes are bytes, the sums of a
// group times its scale stay whole up to the unit's d.
#pragma once
#include "grouped.h"
#include "pairs.h"
#include "q45_k.h"
#include "whole.h"

// PAIRED: with one row of x in a tile, groups go in pairs (pairs.h).
template <typename F>
struct WholeUnit;

template <>
struct WholeUnit<TcQ4_K> {
  typedef WholeEights Layout;
  static constexpr bool paired = true;
  static constexpr bool halves = true;
  typedef InLine<WholeEights> PairLayout;
  struct Lane {
    // A lane's own groups are the even ones, or the odd ones, which are in the
    // high codes and stay where they are: 16 q.
    uint32_t codes;
    uint32_t byte[2];   // selects bytes 0 and 2, or 1 and 3
    uint32_t min_bytes; // as in Head
    uint32_t f16_1024;
    float min_unit;
    DEVICE explicit Lane(uint32_t t) {
      codes = kept(t >= 2 ? 0xf0f0f0f0 : 0x0f0f0f0f);
      byte[0] = kept(0x4440 + t / 2);
      byte[1] = kept(0x4442 + t / 2);
      min_bytes = kept(t % 2 ? 0x4342 : 0x4140);
      f16_1024 = 0x64646464;
      float unit = t % 2 ? 0.0f : -whole_sum_unit;
      min_unit = as_float(kept(__float_as_uint(unit)));
    }
  };

  DEVICE static void unit(
      const uint8_t* r0,
      const uint8_t* r1,
      int,
      const PairOperand<WholeUnit>& x,
      Sums<1>& total) {
    const Lane& lane = x.lane;
    Head head0(r0, x.second, lane.min_bytes, lane.f16_1024);
    Head head1(r1, x.second, lane.min_bytes, lane.f16_1024);
    r0 += x.t8, r1 += x.t8;
    uint32_t mask = lane.codes;
    Whole<1> sums, group;
    UNROLL
    for (int c = 0; c < 4; ++c) {
      uint2 q0 = *(const uint2*)(r0 + 16 + 32 * c);
      uint2 q1 = *(const uint2*)(r1 + 16 + 32 * c);
      uint2 own = x.own_half(c), other = x.other_half(c);
      pair_step(
          Unsigned{},
          group,
          make_uint2(q0.x & mask, q0.y & mask),
          make_uint2(q1.x & mask, q1.y & mask),
          own.x,
          own.y,
          Whole<1>());
      pair_step(
          Unsigned{},
          group,
          make_uint2(q0.x & ~mask, q0.y & ~mask),
          make_uint2(q1.x & ~mask, q1.y & ~mask),
          other.x,
          other.y,
          group);
      fold(
          sums,
          group,
          int(permute(head0.scales[c / 2], 0, lane.byte[c % 2])),
          int(permute(head1.scales[c / 2], 0, lane.byte[c % 2])));
    }
    unite(sums, x, 16);
    uint32_t both = x.own(head0.both, head1.both);
    fold_pairs(total, sums, x, low_half(both) / 16);
    float dmin = high_half(both) * lane.min_unit;
    fold_pair_mins(total, x, head0.mins, head1.mins, dmin);
  }

  template <int TILES>
  DEVICE static void unit(
      const uint8_t* r0,
      const uint8_t* r1,
      int,
      const WholeOperand<TILES>& x,
      Sums<TILES>& total) {
    Head head0(r0, x.t, x.f16_1024), head1(r1, x.t, x.f16_1024);
    // High codes stay where they are: 16 q.
    Whole<TILES> low, high, group;
    UNROLL
    for (int c = 0; c < 4; ++c) {
      uint2 q0 = *(const uint2*)(r0 + 16 + 32 * c + 8 * x.t);
      uint2 q1 = *(const uint2*)(r1 + 16 + 32 * c + 8 * x.t);
      uint4 slot[TILES];
      load_slot(x, c, slot);
      constexpr uint32_t mask = 0x0f0f0f0f;
      step<0>(
          Unsigned{},
          group,
          make_uint2(q0.x & mask, q0.y & mask),
          make_uint2(q1.x & mask, q1.y & mask),
          slot,
          Whole<TILES>());
      fold(
          low,
          group,
          unsigned_byte(head0.scales[c / 2], c % 2 * 2),
          unsigned_byte(head1.scales[c / 2], c % 2 * 2));
      step<1>(
          Unsigned{},
          group,
          make_uint2(q0.x & ~mask, q0.y & ~mask),
          make_uint2(q1.x & ~mask, q1.y & ~mask),
          slot,
          Whole<TILES>());
      fold(
          high,
          group,
          unsigned_byte(head0.scales[c / 2], c % 2 * 2 + 1),
          unsigned_byte(head1.scales[c / 2], c % 2 * 2 + 1));
    }
    fold(high, low, 16, 16);
    fold_unit(total, to_floats(high), x, head0.d / 16, head1.d / 16);
    fold_mins(total, x, head0.mins, head1.mins, head0.dmin, head1.dmin);
  }
};

template <>
struct WholeUnit<TcQ5_K> {
  typedef WholeEights Layout;
  static constexpr bool paired = false;

  // Fifth bits of groups k and k + 4, in bits 0 and 4 of every byte.
  DEVICE static void fifths(uint2 f, uint32_t (&x)[4], uint32_t (&y)[4]) {
    UNROLL
    for (int k = 0; k < 4; ++k) {
      x[k] = f.x >> k & 0x11111111;
      y[k] = f.y >> k & 0x11111111;
    }
  }
  DEVICE static uint32_t code(uint32_t q, const uint32_t (&fifth)[4], int j) {
    uint32_t bits = j < 4 ? fifth[j] << 4 : fifth[j - 4];
    return select(0x0f0f0f0f, j % 2 ? q >> 4 : q, bits);
  }

  template <int TILES>
  DEVICE static void unit(
      const uint8_t* r0,
      const uint8_t* r1,
      int,
      const WholeOperand<TILES>& x,
      Sums<TILES>& total) {
    Head head0(r0, x.t, x.f16_1024), head1(r1, x.t, x.f16_1024);
    uint32_t x0[4], y0[4], x1[4], y1[4];
    fifths(*(const uint2*)(r0 + 16 + 8 * x.t), x0, y0);
    fifths(*(const uint2*)(r1 + 16 + 8 * x.t), x1, y1);
    Whole<TILES> sums, group;
    UNROLL
    for (int c = 0; c < 4; ++c) {
      uint2 q0 = *(const uint2*)(r0 + 48 + 32 * c + 8 * x.t);
      uint2 q1 = *(const uint2*)(r1 + 48 + 32 * c + 8 * x.t);
      uint4 slot[TILES];
      load_slot(x, c, slot);
      UNROLL
      for (int h = 0; h < 2; ++h) {
        int j = 2 * c + h;
        uint2 w0 = make_uint2(code(q0.x, x0, j), code(q0.y, y0, j));
        uint2 w1 = make_uint2(code(q1.x, x1, j), code(q1.y, y1, j));
        if (h == 0) {
          step<0>(Unsigned{}, group, w0, w1, slot, Whole<TILES>());
        } else {
          step<1>(Unsigned{}, group, w0, w1, slot, Whole<TILES>());
        }
        fold(
            sums,
            group,
            unsigned_byte(head0.scales[j / 4], j % 4),
            unsigned_byte(head1.scales[j / 4], j % 4));
      }
    }
    fold_unit(total, to_floats(sums), x, head0.d, head1.d);
    fold_mins(total, x, head0.mins, head1.mins, head0.dmin, head1.dmin);
  }
};

// Bytes are 4 (code - 32).
template <>
struct WholeUnit<TcQ6_K> {
  typedef WholeFours Layout;
  static constexpr bool paired = true;
  static constexpr bool halves = false;
  typedef Spread<WholeEights> PairLayout;
  struct Lane {
    uint32_t flip;     // as in codes()
    uint32_t scale_at; // of its own groups
    DEVICE explicit Lane(uint32_t t) {
      flip = 0xaaaaaaaa;
      scale_at = kept(192 + t / 2);
    }
  };

  // (a ^ b) & c, which the compiler would take apart.
  DEVICE static uint32_t flip_and(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t out;
    asm("lop3.b32 %0, %1, %2, %3, 0x28;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
  }
  // Of planes 0 to 3 that share two words of ql and one of qh. What the upper
  // bit of a code's two in qh takes away makes it signed: flip is 0xaaaaaaaa.
  DEVICE static void codes(
      uint32_t q0, uint32_t q1, uint32_t h, uint32_t flip, uint32_t (&w)[4]) {
    constexpr uint32_t mask = 0x3c3c3c3c;
    uint32_t even = flip_and(h, flip, 0x33333333);
    uint32_t odd = flip_and(h, flip, 0xcccccccc);
    w[0] = select(mask, q0 << 2, even << 6);
    w[1] = select(mask, q1 << 2, odd << 4);
    w[2] = select(mask, q0 >> 2, even << 2);
    w[3] = select(mask, q1 >> 2, odd);
  }

  // 8 bytes of a row that starts at a multiple of 2.
  struct Row {
    const uint8_t* words;
    uint32_t bytes; // of two words, as permutations have it
    DEVICE explicit Row(const uint8_t* row) {
      uint32_t past = uint32_t(uint64_t(row)) & 2;
      words = row - past;
      bytes = past ? 0x5432 : 0x3210;
    }
    DEVICE void load(int at, uint32_t (&w)[2]) const {
      const uint32_t* from = (const uint32_t*)(words + at);
      uint32_t middle = from[1];
      w[0] = permute(from[0], middle, bytes);
      w[1] = permute(middle, from[2], bytes);
    }
  };

  DEVICE static void unit(
      const uint8_t* r0,
      const uint8_t* r1,
      int,
      const PairOperand<WholeUnit>& x,
      Sums<1>& total) {
    Row row0(r0 + x.t8), row1(r1 + x.t8);
    const uint8_t *s0 = r0 + x.lane.scale_at, *s1 = r1 + x.lane.scale_at;
    Whole<1> sums;
    UNROLL
    for (int n = 0; n < 2; ++n) {
      uint32_t w0[2][4], w1[2][4];
      auto load = [&](const Row& row, uint32_t (&w)[2][4]) {
        uint32_t q0[2], q1[2], high[2];
        row.load(64 * n, q0);
        row.load(64 * n + 32, q1);
        row.load(128 + 32 * n, high);
        codes(q0[0], q1[0], high[0], x.lane.flip, w[0]);
        codes(q0[1], q1[1], high[1], x.lane.flip, w[1]);
      };
      load(row0, w0);
      load(row1, w1);
      uint4 slot[2] = {x.slot(2 * n), x.slot(2 * n + 1)};
      UNROLL
      for (int k = 0; k < 4; ++k) {
        const uint4& b = slot[k / 2]; // of planes k and k + 1
        Whole<1> group;
        pair_step(
            Signed{},
            group,
            make_uint2(w0[0][k], w0[1][k]),
            make_uint2(w1[0][k], w1[1][k]),
            k % 2 ? b.z : b.x,
            k % 2 ? b.w : b.y,
            Whole<1>());
        int at = 8 * n + 2 * k;
        fold(sums, group, int8_t(s0[at]), int8_t(s1[at]));
      }
    }
    unite(sums, x, 1);
    const uint16_t* d = (const uint16_t*)(x.own(r0, r1) + 208);
    fold_pairs(total, sums, x, half_to_float(*d) / 4);
  }

  template <int TILES>
  DEVICE static void unit(
      const uint8_t* r0,
      const uint8_t* r1,
      int,
      const WholeOperand<TILES>& x,
      Sums<TILES>& total) {
    uint32_t flip = 0xaaaaaaaa + x.zero;
    Whole<TILES> sums;
    UNROLL
    for (int n = 0; n < 2; ++n) {
      uint4 slot[2][TILES]; // of planes 0, 1 and 2, 3
      load_slot(x, 2 * n, slot[0]);
      load_slot(x, 2 * n + 1, slot[1]);
      UNROLL
      for (int h = 0; h < 2; ++h) {
        uint32_t at = 64 * n + 16 * h + 4 * x.t;
        uint32_t high = 128 + 32 * n + 16 * h + 4 * x.t;
        uint32_t w0[4], w1[4];
        codes(
            load4<2>(r0 + at),
            load4<2>(r0 + at + 32),
            load4<2>(r0 + high),
            flip,
            w0);
        codes(
            load4<2>(r1 + at),
            load4<2>(r1 + at + 32),
            load4<2>(r1 + high),
            flip,
            w1);
        UNROLL
        for (int k = 0; k < 4; ++k) {
          Whole<TILES> group;
          UNROLL
          for (int i = 0; i < TILES; ++i) {
            const uint4& b = slot[k / 2][i];
            uint32_t first = h ? b.y : b.x, second = h ? b.w : b.z;
            mma_half(
                group.v[i],
                w0[k],
                w1[k],
                k % 2 ? second : first,
                Whole<1>().v[0]);
          }
          int at = 192 + 8 * n + 2 * k + h;
          fold(sums, group, int8_t(r0[at]), int8_t(r1[at]));
        }
      }
    }
    float d0 = half_to_float(*(const uint16_t*)(r0 + 208));
    float d1 = half_to_float(*(const uint16_t*)(r1 + 208));
    fold_unit(total, to_floats(sums), x, d0 / 4, d1 / 4);
  }
};
