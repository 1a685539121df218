// Units of Q4_K and Q5_K: 8 groups of 32 weights with 6-bit scales and mins.
// Codes are read as f16 subnormals, q 2^-24, which tensor cores multiply
// exactly.
#pragma once
#include "sums.h"

constexpr float subnormal_unit = 16777216.0f; // 2^24

// The first 16 bytes of a block: mins are those of groups 2 t and 2 t + 1 as
// f16.
struct Head {
  uint32_t both; // d and dmin, as f16
  float d;
  float dmin;
  uint32_t scales[2]; // of groups 0 to 3 and 4 to 7, a byte each
  uint32_t mins;

  DEVICE Head(const uint8_t* block, uint32_t t, uint32_t magic)
      : Head(block, t >= 2, t & 1 ? 0x4342 : 0x4140, magic) {}
  // min_bytes: which two of the four that a lane's groups are of.
  DEVICE Head(
      const uint8_t* block, bool upper, uint32_t min_bytes, uint32_t magic) {
    uint4 head = *(const uint4*)block;
    both = head.x;
    d = low_half(both);
    dmin = high_half(both);
    // Groups 4 to 7 have their high bits above the 6 of groups 0 to 3.
    scales[0] = head.y & 0x3f3f3f3f;
    scales[1] = head.w & 0x0f0f0f0f | head.y >> 2 & 0x30303030;
    uint32_t high = head.w >> 4 & 0x0f0f0f0f | head.z >> 2 & 0x30303030;
    uint32_t four = upper ? high : head.z & 0x3f3f3f3f;
    mins = add2(permute(four, magic, min_bytes), minus_1024);
  }
  // d times a group's scale.
  DEVICE float scale(int group, float d, uint32_t magic) const {
    // 2^23 + scale as f32; the fused multiply-add takes 2^23 d away exactly.
    float s =
        as_float(__byte_perm(scales[group / 4], magic, 0x7440 + group % 4));
    return fmaf(s, d, -8388608.0f * d);
  }
};

struct TcQ4_K {
  static constexpr int block = 256;
  static constexpr int bytes = 144;
  static constexpr int align = 16;
  static constexpr int summed = 32;
  typedef SwappedEights Layout;

  DEVICE static Four codes(uint32_t w0, uint32_t w1, uint32_t mask) {
    return {w0 & mask, w1 & mask, w0 >> 8 & mask, w1 >> 8 & mask};
  }

  template <int TILES, bool SCALED>
  DEVICE static void unit(
      const uint8_t* r0,
      const uint8_t* r1,
      int,
      const Operand<TILES, summed, SCALED>& x,
      Sums<TILES>& total) {
    Head head0(r0, x.t, x.f16_1024), head1(r1, x.t, x.f16_1024);
    float d0 = subnormal_unit * head0.d, d1 = subnormal_unit * head1.d;
    Sums<TILES> sums, mins;
    add_mins(mins, x, 0, head0.mins, head1.mins);
    UNROLL
    for (int c = 0; c < 4; ++c) {
      uint2 q0 = *(const uint2*)(r0 + 16 + 32 * c + 8 * x.t);
      uint2 q1 = *(const uint2*)(r1 + 16 + 32 * c + 8 * x.t);
      UNROLL
      for (int h = 0; h < 2; ++h) {
        uint32_t mask = h ? 0x00f000f0 : 0x000f000f;
        uint4 slot[TILES];
        load_slot(x, 2 * c + h, slot);
        Sums<TILES> group;
        step<0>(group, codes(q0.x, q1.x, mask), slot);
        step<1>(group, codes(q0.y, q1.y, mask), slot);
        // The high codes are 16 q.
        float s0 = head0.scale(2 * c + h, h ? d0 / 16 : d0, x.f32_magic);
        float s1 = head1.scale(2 * c + h, h ? d1 / 16 : d1, x.f32_magic);
        fold(sums, group, s0, s1);
      }
    }
    fold(sums, mins, -sum_unit * head0.dmin, -sum_unit * head1.dmin);
    fold_unit(total, sums, x, 1.0f, 1.0f);
  }
};

struct TcQ5_K {
  static constexpr int block = 256;
  static constexpr int bytes = 176;
  static constexpr int align = 16;
  static constexpr int summed = 32;
  typedef Eights Layout;

  // Codes of group 2 c + h in bytes.
  DEVICE static uint32_t code(uint32_t w, uint32_t fifth, int c, int h) {
    int j = 2 * c + h;
    uint32_t bit = j < 4 ? fifth << (4 - j) : fifth >> (j - 4);
    return (h ? w >> 4 : w) & 0x0f0f0f0f | bit & 0x10101010;
  }
  DEVICE static Four codes(uint32_t c0, uint32_t c1) {
    return {
        __byte_perm(c0, 0, 0x4140),
        __byte_perm(c1, 0, 0x4140),
        __byte_perm(c0, 0, 0x4342),
        __byte_perm(c1, 0, 0x4342)};
  }

  template <int TILES, bool SCALED>
  DEVICE static void unit(
      const uint8_t* r0,
      const uint8_t* r1,
      int,
      const Operand<TILES, summed, SCALED>& x,
      Sums<TILES>& total) {
    Head head0(r0, x.t, x.f16_1024), head1(r1, x.t, x.f16_1024);
    float d0 = subnormal_unit * head0.d, d1 = subnormal_unit * head1.d;
    Sums<TILES> sums, mins;
    add_mins(mins, x, 0, head0.mins, head1.mins);
    uint2 f0 = *(const uint2*)(r0 + 16 + 8 * x.t);
    uint2 f1 = *(const uint2*)(r1 + 16 + 8 * x.t);
    UNROLL
    for (int c = 0; c < 4; ++c) {
      uint2 q0 = *(const uint2*)(r0 + 48 + 32 * c + 8 * x.t);
      uint2 q1 = *(const uint2*)(r1 + 48 + 32 * c + 8 * x.t);
      UNROLL
      for (int h = 0; h < 2; ++h) {
        uint4 slot[TILES];
        load_slot(x, 2 * c + h, slot);
        Sums<TILES> group;
        step<0>(
            group, codes(code(q0.x, f0.x, c, h), code(q1.x, f1.x, c, h)), slot);
        step<1>(
            group, codes(code(q0.y, f0.y, c, h), code(q1.y, f1.y, c, h)), slot);
        float s0 = head0.scale(2 * c + h, d0, x.f32_magic);
        float s1 = head1.scale(2 * c + h, d1, x.f32_magic);
        fold(sums, group, s0, s1);
      }
    }
    fold(sums, mins, -sum_unit * head0.dmin, -sum_unit * head1.dmin);
    fold_unit(total, sums, x, 1.0f, 1.0f);
  }
};
