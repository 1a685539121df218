// Units of Q4_K, Q5_K and Q6_K in whole numbers: codes are bytes, the sums of a
// group times its scale stay whole up to the unit's d.
#pragma once
#include "grouped.h"
#include "q45_k.h"
#include "whole.h"

template <typename F>
struct WholeUnit;

template <>
struct WholeUnit<TcQ4_K> {
  typedef WholeEights Layout;

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

  // Of planes 0 to 3 that share two words of ql and one of qh. What the upper
  // bit of a code's two in qh takes away makes it signed.
  DEVICE static void codes(
      uint32_t q0, uint32_t q1, uint32_t h, uint32_t (&w)[4]) {
    constexpr uint32_t mask = 0x3c3c3c3c;
    uint32_t even = (h ^ 0xaaaaaaaa) & 0x33333333;
    uint32_t odd = (h ^ 0xaaaaaaaa) & 0xcccccccc;
    w[0] = select(mask, q0 << 2, even << 6);
    w[1] = select(mask, q1 << 2, odd << 4);
    w[2] = select(mask, q0 >> 2, even << 2);
    w[3] = select(mask, q1 >> 2, odd);
  }

  template <int TILES>
  DEVICE static void unit(
      const uint8_t* r0,
      const uint8_t* r1,
      int,
      const WholeOperand<TILES>& x,
      Sums<TILES>& total) {
    Whole<TILES> sums;
    UNROLL
    for (int n = 0; n < 2; ++n) {
      uint32_t s0[2], s1[2]; // of groups 8 n to 8 n + 7
      UNROLL
      for (int i = 0; i < 2; ++i) {
        s0[i] = load4<2>(r0 + 192 + 8 * n + 4 * i);
        s1[i] = load4<2>(r1 + 192 + 8 * n + 4 * i);
      }
      uint4 slot[2][TILES]; // of planes 0, 1 and 2, 3
      load_slot(x, 2 * n, slot[0]);
      load_slot(x, 2 * n + 1, slot[1]);
      UNROLL
      for (int h = 0; h < 2; ++h) {
        uint32_t at = 64 * n + 16 * h + 4 * x.t;
        uint32_t high = 128 + 32 * n + 16 * h + 4 * x.t;
        uint32_t w0[4], w1[4];
        codes(
            load4<2>(r0 + at), load4<2>(r0 + at + 32), load4<2>(r0 + high), w0);
        codes(
            load4<2>(r1 + at), load4<2>(r1 + at + 32), load4<2>(r1 + high), w1);
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
          fold(
              sums,
              group,
              signed_byte(s0[k / 2], k % 2 * 2 + h),
              signed_byte(s1[k / 2], k % 2 * 2 + h));
        }
      }
    }
    float d0 = half_to_float(*(const uint16_t*)(r0 + 208));
    float d1 = half_to_float(*(const uint16_t*)(r1 + 208));
    fold_unit(total, to_floats(sums), x, d0 / 4, d1 / 4);
  }
};
