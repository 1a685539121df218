// Q4_K and Q5_K without converts: lanes, teams and groups as in q4_k.h.
#pragma once
#include "q4_k.h"

// The sums of a lane's four groups, over inverse, those of b and d times 16.
// The scales are codes as well, so one more power of two comes off at the end.
template <typename Codes>
inline float scaled(
    half2 d, TeamScales scales, float4 acc, thread const float* sum, float y) {
  half2 a = Codes::pair(scales.ab & 0x00ff00ff);
  half2 b = Codes::pair((scales.ab >> 8) & 0x00ff00ff);
  half2 c = Codes::pair(scales.cd & 0x00ff00ff);
  half2 e = Codes::pair((scales.cd >> 8) & 0x00ff00ff);
  float total = acc[0] * float(a.x);
  total = fma(acc[1] * (1.0f / 16), float(b.x), total);
  total = fma(acc[2], float(c.x), total);
  total = fma(acc[3] * (1.0f / 16), float(e.x), total);
  float mins = sum[0] * float(a.y);
  mins = fma(sum[1], float(b.y), mins);
  mins = fma(sum[2], float(c.y), mins);
  mins = fma(sum[3], float(e.y), mins);
  float high = float(d.x) * (Codes::inverse * Codes::inverse);
  float low = float(d.y) * Codes::inverse;
  return fma(high, total, fma(-low, mins, y));
}

// EACH weights of every group a lane.
template <typename Codes, ushort EACH>
struct Q4KCodeDot {
  typedef uint Element;
  static constant constexpr ushort lanes = 64 / EACH;
  static constant constexpr ushort unit = 256;
  static constant constexpr ushort table_size = 0;
  static uint stride(uint K) {
    return K / 256 * 36;
  }

  struct Weights {
    uint q[EACH / 2]; // a and b, then c and d
    TeamScales scales;
    half2 d;
  };
  template <typename T>
  using Acts = FourGroups<T, EACH>;

  static void fill(threadgroup float*, uint) {}

  static void load(
      device const uint* base,
      uint row,
      uint u,
      uint it,
      uint,
      threadgroup const float*,
      thread Weights& out) {
    uint team = 32 / EACH;
    uint iq = it / team, ir = it % team;
    uint i = row + 36 * u;
    device const ushort* s = (device const ushort*)base;
    uint at = 2 * i + iq;
    out.d = as_type<half2>(base[i]);
    out.scales = TeamScales::unpack(s[at + 2], s[at + 4], s[at + 6]);
    uint q = i + 4 + 8 * iq + EACH / 4 * ir;
    UNROLL
    for (ushort j = 0; j < EACH / 4; ++j) {
      out.q[j] = base[q + j];
      out.q[EACH / 4 + j] = base[q + 16 + j];
    }
  }

  template <typename T>
  static void load_x(
      device const T* x, uint i, uint it, uint, thread Acts<T>& out) {
    FourGroups<T, EACH>::load(x, i, it, out);
  }

  template <typename T>
  static float dot(thread const Weights& w, thread const Acts<T>& a, float y) {
    float4 acc = 0.0f;
    UNROLL
    for (ushort g = 0; g < 4; g += 2) {
      UNROLL
      for (ushort j = 0; j < EACH / 4; ++j) {
        UNROLL
        for (ushort odd = 0; odd < 2; ++odd) {
          uint q = w.q[EACH / 4 * (g / 2) + j] >> (8 * odd);
          ushort i = EACH * g + 4 * j + odd, k = i + EACH;
          acc[g] =
              fma2(a.x[i], a.x[i + 2], Codes::pair(q & 0x000f000f), acc[g]);
          acc[g + 1] =
              fma2(a.x[k], a.x[k + 2], Codes::pair(q & 0x00f000f0), acc[g + 1]);
        }
      }
    }
    return scaled<Codes>(w.d, w.scales, acc, a.sum, y);
  }
};

template <typename Codes>
struct CodeDot<Q4_K, Codes> : Q4KCodeDot<Codes, 8> {};

// With 16-byte loads and half the lanes on a block.
template <typename F>
struct WideDot;
template <>
struct WideDot<Q4_K> : Q4KCodeDot<Subnormal, 16> {};

template <typename Codes>
struct CodeDot<Q5_K, Codes> {
  typedef uint Element;
  static constant constexpr ushort lanes = 8;
  static constant constexpr ushort unit = 256;
  static constant constexpr ushort table_size = 0;
  static uint stride(uint K) {
    return K / 256 * 44;
  }

  struct Weights {
    uint q[4];
    uint fifth[2]; // bits 0, 1, 4 and 5 of a byte: the top bits of a, b, c, d
    TeamScales scales;
    half2 d;
  };
  template <typename T>
  using Acts = FourGroups<T, 8>;

  static void fill(threadgroup float*, uint) {}

  static void load(
      device const uint* base,
      uint row,
      uint u,
      uint it,
      uint,
      threadgroup const float*,
      thread Weights& out) {
    uint iq = it / 4, ir = it % 4;
    uint i = row + 44 * u;
    device const ushort* s = (device const ushort*)base;
    uint at = 2 * i + iq;
    out.d = as_type<half2>(base[i]);
    out.scales = TeamScales::unpack(s[at + 2], s[at + 4], s[at + 6]);
    uint q = i + 12 + 8 * iq + 2 * ir;
    UNROLL
    for (ushort j = 0; j < 2; ++j) {
      out.q[j] = base[q + j];
      out.q[2 + j] = base[q + 16 + j];
      out.fifth[j] = base[i + 4 + 2 * ir + j] >> (2 * iq);
    }
  }

  template <typename T>
  static void load_x(
      device const T* x, uint i, uint it, uint, thread Acts<T>& out) {
    FourGroups<T, 8>::load(x, i, it, out);
  }

  template <typename T>
  static float dot(thread const Weights& w, thread const Acts<T>& a, float y) {
    float4 acc = 0.0f;
    UNROLL
    for (ushort j = 0; j < 2; ++j) {
      UNROLL
      for (ushort odd = 0; odd < 2; ++odd) {
        uint ab = w.q[j] >> (8 * odd), cd = w.q[2 + j] >> (8 * odd);
        uint h = w.fifth[j] >> (8 * odd);
        ushort i = 4 * j + odd;
        uint code = (ab & 0x000f000f) | ((h & 0x00010001) << 4);
        acc[0] = fma2(a.x[i], a.x[i + 2], Codes::pair(code), acc[0]);
        code = (ab & 0x00f000f0) | ((h & 0x00020002) << 7);
        acc[1] = fma2(a.x[i + 8], a.x[i + 10], Codes::pair(code), acc[1]);
        code = (cd & 0x000f000f) | (h & 0x00100010);
        acc[2] = fma2(a.x[i + 16], a.x[i + 18], Codes::pair(code), acc[2]);
        code = (cd & 0x00f000f0) | ((h & 0x00200020) << 3);
        acc[3] = fma2(a.x[i + 24], a.x[i + 26], Codes::pair(code), acc[3]);
      }
    }
    return scaled<Codes>(w.d, w.scales, acc, a.sum, y);
  }
};
