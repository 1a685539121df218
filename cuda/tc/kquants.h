// Units of the k-quants with 16 weights a group whose codes times their scale
// are exact in f16: Q2_K and Q3_K. A code is read as an f16 subnormal, q 2^-24,
// and times scale 2^10 gives the tensor core q * scale 2^-14; d is left for the
// sum.
#pragma once
#include "sums.h"

constexpr float unit_scale = 16384.0f;
constexpr uint32_t minus_1056 = 0xe420e420;

// The pair of halves K of two pairs: 0 and 1 of `first`, 2 and 3 of `second`.
DEVICE uint32_t pick(uint32_t first, uint32_t second, int k) {
  uint32_t two = k < 2 ? first : second;
  return k % 2 ? both_high(two) : both_low(two);
}

struct TcQ2_K {
  static constexpr int block = 256;
  static constexpr int bytes = 84;
  static constexpr int align = 4;
  static constexpr int summed = 16;
  typedef SwappedEights Layout;

  // Codes under `mask` in bytes 0, 2 and 1, 3 times a row's scale.
  DEVICE static Four codes(
      uint32_t w0, uint32_t w1, uint32_t mask, uint32_t s0, uint32_t s1) {
    return {
        mul2(w0 & mask, s0),
        mul2(w1 & mask, s1),
        mul2(w0 >> 8 & mask, s0),
        mul2(w1 >> 8 & mask, s1)};
  }
  // Scales of plane pairs 0, 1 and 2, 3 of half n, for codes 4^k q.
  DEVICE static void scales(
      const uint8_t* r, int n, uint32_t t, uint32_t& first, uint32_t& second) {
    uint32_t shift = 8 * (t >> 1);
    uint32_t a = *(const uint32_t*)(r + 8 * n) >> shift & 0x000f000f;
    uint32_t b = *(const uint32_t*)(r + 8 * n + 4) >> shift & 0x000f000f;
    first = mul2(add2(a | 0x64006400, minus_1024), 0x5c006400);  // 2^8, 2^10
    second = mul2(add2(b | 0x64006400, minus_1024), 0x4c005400); // 2^4, 2^6
  }
  DEVICE static uint32_t mins_of(
      const uint8_t* r, int n, uint32_t t, uint32_t magic) {
    uint32_t two = *(const uint16_t*)(r + 8 * n + 2 * t);
    return first_two(two >> 4 & 0x0f0f, magic, minus_1024);
  }

  template <int TILES, bool SCALED>
  DEVICE static void unit(
      const uint8_t* r0,
      const uint8_t* r1,
      int,
      const Operand<TILES, summed, SCALED>& x,
      Sums<TILES>& total) {
    Sums<TILES> sums, mins;
    UNROLL
    for (int n = 0; n < 2; ++n) {
      add_mins(
          mins,
          x,
          n,
          mins_of(r0, n, x.t, x.f16_1024),
          mins_of(r1, n, x.t, x.f16_1024));
      uint32_t first0, second0, first1, second1;
      scales(r0, n, x.t, first0, second0);
      scales(r1, n, x.t, first1, second1);
      const uint32_t* q0 = (const uint32_t*)(r0 + 16 + 32 * n + 8 * x.t);
      const uint32_t* q1 = (const uint32_t*)(r1 + 16 + 32 * n + 8 * x.t);
      uint32_t a0 = q0[0], b0 = q0[1], a1 = q1[0], b1 = q1[1];
      UNROLL
      for (int k = 0; k < 4; ++k) {
        uint4 slot[TILES];
        load_slot(x, 4 * n + k, slot);
        uint32_t s0 = pick(first0, second0, k), s1 = pick(first1, second1, k);
        uint32_t mask = 0x00030003 << (2 * k);
        step<0>(sums, codes(a0, a1, mask, s0, s1), slot);
        step<1>(sums, codes(b0, b1, mask, s0, s1), slot);
      }
    }
    uint32_t d0 = *(const uint32_t*)(r0 + 80), d1 = *(const uint32_t*)(r1 + 80);
    fold_unit(
        total, sums, x, unit_scale * low_half(d0), unit_scale * low_half(d1));
    fold_unit(
        total, mins, x, -sum_unit * high_half(d0), -sum_unit * high_half(d1));
  }
};

struct TcQ3_K {
  static constexpr int block = 256;
  static constexpr int bytes = 110;
  static constexpr int align = 2;
  static constexpr int summed = 0;
  typedef Eights Layout;

  // Signed scales of planes 0, 1 and 2, 3 of half n.
  DEVICE static void scales(
      const uint32_t (&s)[3],
      int n,
      uint32_t t,
      uint32_t& first,
      uint32_t& second) {
    uint32_t shift = 8 * (t >> 1) + 4 * n;
    uint32_t a = s[0] >> shift & 0x000f000f | (s[2] >> shift & 0x00030003) << 4;
    uint32_t b = s[1] >> shift & 0x000f000f | (s[2] >> shift >> 2 & 0x00030003)
                                                  << 4;
    first = add2(a | 0x64006400, minus_1056);
    second = add2(b | 0x64006400, minus_1056);
  }
  // (code - 4) times a scale; s is the scale times 2^10 and z times -2^-12.
  DEVICE static Four codes(
      uint32_t c0,
      uint32_t c1,
      uint32_t s0,
      uint32_t s1,
      uint32_t z0,
      uint32_t z1) {
    return {
        fma2(__byte_perm(c0, 0, 0x4140), s0, z0),
        fma2(__byte_perm(c1, 0, 0x4140), s1, z1),
        fma2(__byte_perm(c0, 0, 0x4342), s0, z0),
        fma2(__byte_perm(c1, 0, 0x4342), s1, z1)};
  }
  DEVICE static uint32_t code(uint32_t q, uint32_t mask, int n, int k) {
    return q >> (2 * k) & 0x03030303 | (mask >> (4 * n + k) & 0x01010101) << 2;
  }

  template <int TILES, bool SCALED>
  DEVICE static void unit(
      const uint8_t* r0,
      const uint8_t* r1,
      int,
      const Operand<TILES, summed, SCALED>& x,
      Sums<TILES>& total) {
    Sums<TILES> sums;
    uint32_t m0[2], m1[2], sc0[3], sc1[3];
    UNROLL
    for (int i = 0; i < 2; ++i) {
      m0[i] = load4<2>(r0 + 8 * x.t + 4 * i);
      m1[i] = load4<2>(r1 + 8 * x.t + 4 * i);
    }
    UNROLL
    for (int i = 0; i < 3; ++i) {
      sc0[i] = load4<2>(r0 + 96 + 4 * i);
      sc1[i] = load4<2>(r1 + 96 + 4 * i);
    }
    UNROLL
    for (int n = 0; n < 2; ++n) {
      uint32_t first0, second0, first1, second1, q0[2], q1[2];
      scales(sc0, n, x.t, first0, second0);
      scales(sc1, n, x.t, first1, second1);
      UNROLL
      for (int i = 0; i < 2; ++i) {
        q0[i] = load4<2>(r0 + 32 + 32 * n + 8 * x.t + 4 * i);
        q1[i] = load4<2>(r1 + 32 + 32 * n + 8 * x.t + 4 * i);
      }
      UNROLL
      for (int k = 0; k < 4; ++k) {
        uint4 slot[TILES];
        load_slot(x, 4 * n + k, slot);
        uint32_t s0 = pick(first0, second0, k), s1 = pick(first1, second1, k);
        uint32_t z0 = mul2(s0, 0x8c008c00), z1 = mul2(s1, 0x8c008c00);
        s0 = mul2(s0, 0x64006400);
        s1 = mul2(s1, 0x64006400);
        step<0>(
            sums,
            codes(
                code(q0[0], m0[0], n, k),
                code(q1[0], m1[0], n, k),
                s0,
                s1,
                z0,
                z1),
            slot);
        step<1>(
            sums,
            codes(
                code(q0[1], m0[1], n, k),
                code(q1[1], m1[1], n, k),
                s0,
                s1,
                z0,
                z1),
            slot);
      }
    }
    float d0 = half_to_float(*(const uint16_t*)(r0 + 108));
    float d1 = half_to_float(*(const uint16_t*)(r1 + 108));
    fold_unit(total, sums, x, unit_scale * d0, unit_scale * d1);
  }
};
