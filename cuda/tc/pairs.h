// Whole numbers for one row of x, which leaves columns of 8 for a second group
// of w: columns 0 to 2 have x's digits for the group that the depths of lanes t
// of 0 and 1 belong to, columns 4 to 6 for that of lanes 2 and 3, zeros
// elsewhere. So lanes t of 0 and 1 get the sums of the one, and the others
// those of the other, and a step and a fold serve both.
#pragma once
#include "whole.h"

// U: a WholeUnit; its PairLayout says how x lies, its Lane what else stays in
// registers, and `halves` that it takes own_half() and other_half(), not slots.
template <typename U>
struct PairOperand {
  typedef typename U::PairLayout Layout;
  typedef ::Digits<Layout> Digits;
  const uint8_t* unit;
  const uint8_t* zeros; // 256 bytes
  uint32_t at;          // where the lane's part of a unit starts
  uint32_t t8;          // 8 t
  bool live;            // whether its column and its depths are of one group
  bool second; // it has sums of the second group, in the end of row g + 8
  typename U::Lane lane;

  DEVICE PairOperand(uint32_t, uint32_t g, uint32_t t) : lane(t) {
    t8 = kept(8 * t);
    second = kept(t) >= 2;
    live = kept(g / 4 ^ t / 2) == 0;
    at = min(g % 4, 2u) * Layout::column_bytes;
    at = kept(at + (U::halves ? g / 4 * 32 + 8 * t : 16 * t));
  }
  // 16 bytes for depths of the lane's own group.
  DEVICE uint4 slot(int pair) const {
    return *(const uint4*)((live ? unit + at : zeros) + 64 * pair);
  }
  // 8 bytes for a step that has the lane's own group, or the other one.
  DEVICE uint2 own_half(int pair) const {
    return *(const uint2*)((live ? unit + at : zeros) + 64 * pair);
  }
  DEVICE uint2 other_half(int pair) const {
    return *(const uint2*)((live ? zeros : unit + at) + 64 * pair);
  }
  DEVICE uint2 sums() const {
    return *(const uint2*)(unit + Digits::sums_at + t8);
  }
  DEVICE float inverse() const {
    return *(const float*)(unit + Digits::inverse_at);
  }
  // Of what rows g and g + 8 have, that of the row whose sums it ends up with.
  template <typename V>
  DEVICE V own(V first, V other) const {
    return second ? other : first;
  }
};

template <typename KIND>
DEVICE void pair_step(
    KIND kind,
    Whole<1>& sums,
    uint2 w0,
    uint2 w1,
    uint32_t x0,
    uint32_t x1,
    const Whole<1>& from) {
  mma(kind, sums.v[0], w0.x, w1.x, w0.y, w1.y, x0, x1, from.v[0]);
}

// The sums of all groups, those of the first ones times `first`: lanes t of 0
// and 1 get those of row g, the others those of row g + 8, in place of the
// first two.
template <typename U>
DEVICE void unite(Whole<1>& sums, const PairOperand<U>& x, int first) {
  int times = x.own(first, 1);
  int (&v)[4] = sums.v[0];
  UNROLL
  for (int c = 0; c < 2; ++c) {
    int sent = x.own(v[c + 2], v[c]), mine = x.own(v[c], v[c + 2]);
    v[c] = times * mine + __shfl_xor_sync(~0u, times * sent, 2);
  }
}

// total += scale * sums, as fold_unit() of whole.h; the scale is that of the
// lane's own row.
template <typename U>
DEVICE void fold_pairs(
    Sums<1>& total,
    const Whole<1>& sums,
    const PairOperand<U>& x,
    float scale) {
  float all = scale * x.inverse();
  UNROLL
  for (int c = 0; c < 2; ++c) {
    total.v[0][c] = fmaf(all, float(sums.v[0][c]), total.v[0][c]);
  }
}

// As fold_mins() of whole.h; the scale is that of the lane's own row, 0 for
// lanes without the first digit.
template <typename U>
DEVICE void fold_pair_mins(
    Sums<1>& total,
    const PairOperand<U>& x,
    uint32_t mins0,
    uint32_t mins1,
    float scale) {
  uint2 b = x.sums();
  float sums[4] = {};
  mma(sums,
      mins0,
      mins1,
      mul2(mins0, f16_sum_rest),
      mul2(mins1, f16_sum_rest),
      b.x,
      b.y);
  scale *= x.inverse();
  total.v[0][0] = fmaf(scale, x.own(sums[0], sums[2]), total.v[0][0]);
}
