// Q4_K as 4 cohorts of 8 lanes, a block each. Lane it of a cohort is lane
// ir = it % 4 of team iq = it / 4. A team has the groups a = 2 iq, b = a + 1,
// c = a + 4 and d = a + 5, whose scales and mins lie side by side; a lane has 8
// weights of each, in 8 contiguous bytes for a and b and 8 for c and d. With
// EACH = 16 a cohort is half as many lanes with twice as much.
#pragma once
#include "../rows.h"
#include "codes.h"

// x of one lane, EACH of each group in the order a, b, c, d, and their sums.
template <typename T, ushort EACH>
struct FourGroups {
  static constant constexpr ushort count = 4 * EACH;
  Held<T> x[count];
  float sum[4];

  // i: index of the unit's first x.
  static void load(
      device const T* x, uint i, uint it, thread FourGroups<T, EACH>& out) {
    uint team = 32 / EACH;
    uint first = i + 64 * (it / team) + EACH * (it % team);
    UNROLL
    for (ushort g = 0; g < 4; ++g) {
      uint from = first + 32 * (g % 2) + 128 * (g / 2);
      float sum = 0.0f;
      UNROLL
      for (ushort j = 0; j < EACH; ++j) {
        out.x[EACH * g + j] = Held<T>(x[from + j]);
        sum += float(out.x[EACH * g + j]);
      }
      out.sum[g] = sum;
    }
  }
};

// The 6-bit scales and mins of a team's groups: bytes a, b of the scales and
// a, b of the mins in `ab`, those of c and d in `cd`.
struct TeamScales {
  uint ab;
  uint cd;

  // s0, s2, s4: bytes 2 iq and 2 iq + 1, those 4 further on, those 8 further.
  static TeamScales unpack(ushort s0, ushort s2, ushort s4) {
    uint first = as_type<uint>(ushort2(s0, s2));
    uint low = as_type<uint>(ushort2(s4, ushort(s4 >> 4)));
    TeamScales out;
    out.ab = first & 0x3f3f3f3f;
    out.cd = (low & 0x0f0f0f0f) | ((first & 0xc0c0c0c0) >> 2);
    return out;
  }
};

// The note's form: codes masked where they lie and converted, the powers of two
// taken out at the end.
template <typename F>
struct ShiftDot;

template <>
struct ShiftDot<Q4_K> {
  typedef ushort Element;
  static constant constexpr ushort lanes = 8;
  static constant constexpr ushort unit = 256;
  static constant constexpr ushort table_size = 0;
  static uint stride(uint K) {
    return K / 256 * 72;
  }

  struct Weights {
    ushort q[8];
    TeamScales scales;
    half2 d; // d and dmin
  };
  template <typename T>
  using Acts = FourGroups<T, 8>;

  static void fill(threadgroup float*, uint) {}

  static void load(
      device const ushort* base,
      uint row,
      uint u,
      uint it,
      uint,
      threadgroup const float*,
      thread Weights& out) {
    uint iq = it / 4, ir = it % 4;
    uint i = row + 72 * u;
    out.d = as_type<half2>(word(base, i));
    out.scales = TeamScales::unpack(
        base[i + 2 + iq], base[i + 4 + iq], base[i + 6 + iq]);
    uint q = i + 8 + 16 * iq + 4 * ir;
    UNROLL
    for (ushort j = 0; j < 4; ++j) {
      out.q[j] = base[q + j];
      out.q[4 + j] = base[q + 32 + j];
    }
  }

  template <typename T>
  static void load_x(
      device const T* x, uint i, uint it, uint, thread Acts<T>& out) {
    FourGroups<T, 8>::load(x, i, it, out);
  }

  template <typename T>
  static float dot(thread const Weights& w, thread const Acts<T>& a, float y) {
    float total = 0.0f, mins = 0.0f;
    UNROLL
    for (ushort pair = 0; pair < 2; ++pair) {
      float4 acc = 0.0f;
      ushort x = 16 * pair;
      UNROLL
      for (ushort i = 0; i < 4; ++i) {
        ushort q = w.q[4 * pair + i];
        acc[0] = fma(float(a.x[x + 2 * i]), float(q & 0x000f), acc[0]);
        acc[1] = fma(float(a.x[x + 2 * i + 1]), float(q & 0x0f00), acc[1]);
        acc[2] = fma(float(a.x[x + 2 * i + 8]), float(q & 0x00f0), acc[2]);
        acc[3] = fma(float(a.x[x + 2 * i + 9]), float(q & 0xf000), acc[3]);
      }
      uchar4 s = as_type<uchar4>(pair ? w.scales.cd : w.scales.ab);
      float first = fma(acc[1], 1.0f / 256, acc[0]);
      float second = fma(acc[3], 1.0f / 256, acc[2]) * (1.0f / 16);
      total = fma(first, float(s[0]), total);
      total = fma(second, float(s[1]), total);
      mins = fma(a.sum[2 * pair], float(s[2]), mins);
      mins = fma(a.sum[2 * pair + 1], float(s[3]), mins);
    }
    return fma(float(w.d.x), total, fma(-float(w.d.y), mins, y));
  }
};
