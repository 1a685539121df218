// Units of the types whose scaled codes f16 cannot hold: the codes alone go
// through the tensor cores, exact, and every group's sum is scaled in f32.
#pragma once
#include "sums.h"

struct TcQ6_K {
  static constexpr int block = 256;
  static constexpr int bytes = 210;
  static constexpr int align = 2;
  static constexpr int summed = 0;
  typedef Fours Layout;
  static constexpr uint32_t bias = 0xe420e420; // -(1024 + 32)

  template <int TILES, bool SCALED>
  DEVICE static void unit(
      const uint8_t* r0,
      const uint8_t* r1,
      int,
      const Operand<TILES, summed, SCALED>& x,
      Sums<TILES>& total) {
    Sums<TILES> sums;
    UNROLL
    for (int n = 0; n < 2; ++n) {
      uint32_t h0[2], h1[2];
      UNROLL
      for (int h = 0; h < 2; ++h) {
        h0[h] = load4<2>(r0 + 128 + 32 * n + 16 * h + 4 * x.t);
        h1[h] = load4<2>(r1 + 128 + 32 * n + 16 * h + 4 * x.t);
      }
      // Of groups 8 n to 8 n + 7.
      uint32_t s0[2], s1[2];
      UNROLL
      for (int i = 0; i < 2; ++i) {
        s0[i] = load4<2>(r0 + 192 + 8 * n + 4 * i);
        s1[i] = load4<2>(r1 + 192 + 8 * n + 4 * i);
      }
      auto scale = [](const uint32_t (&s)[2], int group) {
        return float(int8_t(s[group / 4] >> (8 * (group % 4))));
      };
      UNROLL
      for (int k = 0; k < 2; ++k) {
        uint4 low[TILES], high[TILES];
        load_slot(x, 4 * n + k, low);
        load_slot(x, 4 * n + k + 2, high);
        UNROLL
        for (int h = 0; h < 2; ++h) {
          uint32_t w0 = load4<2>(r0 + 64 * n + 32 * k + 16 * h + 4 * x.t);
          uint32_t w1 = load4<2>(r1 + 64 * n + 32 * k + 16 * h + 4 * x.t);
          auto low_codes = [&](uint32_t w, uint32_t v) {
            return w & 0x0f0f0f0f | (v >> (2 * k) & 0x03030303) << 4;
          };
          auto high_codes = [&](uint32_t w, uint32_t v) {
            return w >> 4 & 0x0f0f0f0f | v >> (2 * k) & 0x30303030;
          };
          Sums<TILES> a, b;
          Four low_four = four(
              low_codes(w0, h0[h]), low_codes(w1, h1[h]), x.f16_1024, bias);
          Four high_four = four(
              high_codes(w0, h0[h]), high_codes(w1, h1[h]), x.f16_1024, bias);
          if (h == 0) {
            step<0>(a, low_four, low);
            step<0>(b, high_four, high);
          } else {
            step<1>(a, low_four, low);
            step<1>(b, high_four, high);
          }
          fold(sums, a, scale(s0, 2 * k + h), scale(s1, 2 * k + h));
          fold(sums, b, scale(s0, 2 * k + 4 + h), scale(s1, 2 * k + 4 + h));
        }
      }
    }
    float d0 = half_to_float(*(const uint16_t*)(r0 + 208));
    float d1 = half_to_float(*(const uint16_t*)(r1 + 208));
    fold_unit(total, sums, x, d0, d1);
  }
};

// 8 blocks of 32 weights; the last unit of a row may have fewer.
struct TcQ8_0 {
  static constexpr int block = 32;
  static constexpr int bytes = 8 * 34;
  static constexpr int align = 2;
  static constexpr int summed = 0;
  typedef Eights Layout;
  static constexpr uint32_t bias = 0xe480e480; // -(1024 + 128)

  template <int TILES, bool SCALED>
  DEVICE static void unit(
      const uint8_t* r0,
      const uint8_t* r1,
      int blocks,
      const Operand<TILES, summed, SCALED>& x,
      Sums<TILES>& total) {
    Sums<TILES> sums;
    UNROLL
    for (int b = 0; b < 8; ++b) {
      if (b < blocks) {
        uint4 slot[TILES];
        load_slot(x, b, slot);
        const uint8_t* q0 = r0 + 34 * b + 2 + 8 * x.t;
        const uint8_t* q1 = r1 + 34 * b + 2 + 8 * x.t;
        constexpr uint32_t flip = 0x80808080;
        Sums<TILES> block;
        step<0>(
            block,
            four(load4<2>(q0) ^ flip, load4<2>(q1) ^ flip, x.f16_1024, bias),
            slot);
        step<1>(
            block,
            four(
                load4<2>(q0 + 4) ^ flip,
                load4<2>(q1 + 4) ^ flip,
                x.f16_1024,
                bias),
            slot);
        fold(
            sums,
            block,
            half_to_float(*(const uint16_t*)(r0 + 34 * b)),
            half_to_float(*(const uint16_t*)(r1 + 34 * b)));
      }
    }
    fold_unit(total, sums, x, 1.0f, 1.0f);
  }
};

// 32 weights in nibbles: d, a min with MIN, the fifth bits with FIFTH, 16
// bytes.
template <bool MIN, bool FIFTH>
struct TcNibbles {
  static constexpr int block_bytes = 18 + 2 * MIN + 4 * FIFTH;
  static constexpr int block = 32;
  static constexpr int bytes = 8 * block_bytes;
  static constexpr int align = MIN ? 4 : 2;
  static constexpr int summed = MIN ? 32 : 0;
  typedef Fours Layout;
  // -(1024 + 8 or 16), -1024 where there is a min.
  static constexpr uint32_t bias = MIN     ? 0xe400e400
                                   : FIFTH ? 0xe410e410
                                           : 0xe408e408;
  static constexpr int fifth_at = 2 + 2 * MIN;
  static constexpr int codes_at = fifth_at + 4 * FIFTH;

  // Bit 4 of 4 codes from bits 0 to 3.
  DEVICE static uint32_t spread(uint32_t bits) {
    return (bits & 15) * 0x02040810 & 0x10101010;
  }
  DEVICE static void codes(
      const uint8_t* block, uint32_t t, uint32_t& low, uint32_t& high) {
    uint32_t w = load4<align>(block + codes_at + 4 * t);
    low = w & 0x0f0f0f0f;
    high = w >> 4 & 0x0f0f0f0f;
    if (FIFTH) {
      uint32_t fifth = load4<align>(block + fifth_at) >> (4 * t);
      low |= spread(fifth);
      high |= spread(fifth >> 16);
    }
  }
  // Mins of blocks 2 t and 2 t + 1.
  DEVICE static uint32_t mins_of(const uint8_t* r, int blocks, uint32_t t) {
    const uint8_t* at = r + 2 * block_bytes * t + 2;
    uint32_t first = int(2 * t) < blocks ? *(const uint16_t*)at : 0;
    uint32_t second =
        int(2 * t + 1) < blocks ? *(const uint16_t*)(at + block_bytes) : 0;
    return first | second << 16;
  }

  template <int TILES, bool SCALED>
  DEVICE static void unit(
      const uint8_t* r0,
      const uint8_t* r1,
      int blocks,
      const Operand<TILES, summed, SCALED>& x,
      Sums<TILES>& total) {
    Sums<TILES> sums;
    if constexpr (MIN) {
      // Any f16: a factor of sum_rest would push small ones out of its range.
      uint32_t mins0 = mins_of(r0, blocks, x.t),
               mins1 = mins_of(r1, blocks, x.t);
      Sums<TILES> high, rest;
      UNROLL
      for (int i = 0; i < TILES; ++i) {
        uint2 b = x.sums(0, i);
        mma(high.v[i], mins0, mins1, 0, 0, b.x, 0);
        mma(rest.v[i], mins0, mins1, 0, 0, b.y, 0);
      }
      fold(sums, high, sum_unit, sum_unit);
      fold(sums, rest, sum_unit / sum_rest, sum_unit / sum_rest);
    }
    UNROLL
    for (int b = 0; b < 8; ++b) {
      if (b < blocks) {
        uint4 slot[TILES];
        load_slot(x, b, slot);
        uint32_t low0, high0, low1, high1;
        codes(r0 + block_bytes * b, x.t, low0, high0);
        codes(r1 + block_bytes * b, x.t, low1, high1);
        Sums<TILES> block;
        step<0>(block, four(low0, low1, x.f16_1024, bias), slot);
        step<1>(block, four(high0, high1, x.f16_1024, bias), slot);
        fold(
            sums,
            block,
            half_to_float(*(const uint16_t*)(r0 + block_bytes * b)),
            half_to_float(*(const uint16_t*)(r1 + block_bytes * b)));
      }
    }
    fold_unit(total, sums, x, 1.0f, 1.0f);
  }
};
typedef TcNibbles<false, false> TcQ4_0;
typedef TcNibbles<true, false> TcQ4_1;
typedef TcNibbles<false, true> TcQ5_0;
typedef TcNibbles<true, true> TcQ5_1;
