// Q6_K and Q8_0 without converts. Their codes are unsigned with a bias, which
// the sums of x take out; both are aligned to 2 bytes only.
#pragma once
#include "../rows.h"
#include "codes.h"

// 4 cohorts of 8 lanes, a block each. Lane it has half n = it / 4 of the block
// and there bytes 8 ir to 8 ir + 7 of each of the two runs of 32 low parts and
// of the run of high parts: 8 weights of each of the planes k = 0 to 3.
template <typename Codes>
struct CodeDot<Q6_K, Codes> {
  typedef ushort Element;
  static constant constexpr ushort lanes = 8;
  static constant constexpr ushort unit = 256;
  static constant constexpr ushort table_size = 0;
  static uint stride(uint K) {
    return K / 256 * 105;
  }

  struct Weights {
    uint low[4]; // planes 0 and 2, then planes 1 and 3
    uint high[2];
    uint scales[2]; // planes 0 and 1, planes 2 and 3: byte + 128
    half d;
  };
  template <typename T>
  struct Acts {
    Held<T> x[32];
    float sum[4];
  };

  static void fill(threadgroup float*, uint) {}

  static void load(
      device const ushort* base,
      uint row,
      uint u,
      uint it,
      uint,
      threadgroup const float*,
      thread Weights& out) {
    uint n = it / 4, ir = it % 4;
    uint i = row + 105 * u;
    uint low = i + 32 * n + 4 * ir, high = i + 64 + 16 * n + 4 * ir;
    uint s = i + 96 + 4 * n;
    UNROLL
    for (ushort j = 0; j < 2; ++j) {
      out.low[j] = word(base, low + 2 * j);
      out.low[2 + j] = word(base, low + 16 + 2 * j);
      out.high[j] = word(base, high + 2 * j);
      // A scale covers 16 weights: the lower or the upper byte of each pair.
      uint both = word(base, s + 2 * j) ^ 0x80808080;
      out.scales[j] = (both >> (8 * (ir / 2))) & 0x00ff00ff;
    }
    out.d = as_type<half>(base[i + 104]);
  }

  template <typename T>
  static void load_x(
      device const T* x, uint i, uint it, uint, thread Acts<T>& out) {
    uint first = i + 128 * (it / 4) + 8 * (it % 4);
    UNROLL
    for (ushort k = 0; k < 4; ++k) {
      float sum = 0.0f;
      UNROLL
      for (ushort j = 0; j < 8; ++j) {
        out.x[8 * k + j] = Held<T>(x[first + 32 * k + j]);
        sum += float(out.x[8 * k + j]);
      }
      out.sum[k] = sum;
    }
  }

  template <typename T>
  static float dot(thread const Weights& w, thread const Acts<T>& a, float y) {
    float4 acc = 0.0f; // over inverse; planes 2 and 3 times 16
    UNROLL
    for (ushort j = 0; j < 2; ++j) {
      UNROLL
      for (ushort odd = 0; odd < 2; ++odd) {
        uint p = w.low[j] >> (8 * odd), q = w.low[2 + j] >> (8 * odd);
        uint h = w.high[j] >> (8 * odd);
        uint h2 = h << 2, h4 = h << 4;
        ushort i = 4 * j + odd;
        uint code = (p & 0x000f000f) | (h4 & 0x00300030);
        acc[0] = fma2(a.x[i], a.x[i + 2], Codes::pair(code), acc[0]);
        code = (q & 0x000f000f) | (h2 & 0x00300030);
        acc[1] = fma2(a.x[i + 8], a.x[i + 10], Codes::pair(code), acc[1]);
        code = (p & 0x00f000f0) | (h4 & 0x03000300);
        acc[2] = fma2(a.x[i + 16], a.x[i + 18], Codes::pair(code), acc[2]);
        code = (q & 0x00f000f0) | (h2 & 0x03000300);
        acc[3] = fma2(a.x[i + 24], a.x[i + 26], Codes::pair(code), acc[3]);
      }
    }
    float total = 0.0f;
    UNROLL
    for (ushort k = 0; k < 4; ++k) {
      float power = k < 2 ? Codes::inverse : Codes::inverse / 16;
      float product = fma(-32.0f, a.sum[k], acc[k] * power);
      half2 s = Codes::pair(w.scales[k / 2]);
      float biased = float(k % 2 ? s.y : s.x);
      total = fma(fma(biased, Codes::inverse, -128.0f), product, total);
    }
    return fma(float(w.d), total, y);
  }
};

// 16 cohorts of 2 lanes, a block each; a lane has 16 contiguous weights.
template <typename Codes>
struct CodeDot<Q8_0, Codes> {
  typedef ushort Element;
  static constant constexpr ushort lanes = 2;
  static constant constexpr ushort unit = 32;
  static constant constexpr ushort table_size = 0;
  static uint stride(uint K) {
    return K / 32 * 17;
  }

  struct Weights {
    uint q[4]; // bytes + 128
    half d;
  };
  template <typename T>
  struct Acts {
    Held<T> x[16];
    float sum;
  };

  static void fill(threadgroup float*, uint) {}

  static void load(
      device const ushort* base,
      uint row,
      uint u,
      uint it,
      uint,
      threadgroup const float*,
      thread Weights& out) {
    uint i = row + 17 * u;
    out.d = as_type<half>(base[i]);
    UNROLL
    for (ushort j = 0; j < 4; ++j) {
      out.q[j] = word(base, i + 1 + 8 * it + 2 * j) ^ 0x80808080;
    }
  }

  template <typename T>
  static void load_x(
      device const T* x, uint i, uint it, uint, thread Acts<T>& out) {
    float sum = 0.0f;
    UNROLL
    for (ushort j = 0; j < 16; ++j) {
      out.x[j] = Held<T>(x[i + 16 * it + j]);
      sum += float(out.x[j]);
    }
    out.sum = sum;
  }

  template <typename T>
  static float dot(thread const Weights& w, thread const Acts<T>& a, float y) {
    float even = 0.0f, odd = 0.0f;
    UNROLL
    for (ushort j = 0; j < 4; ++j) {
      uint q = w.q[j];
      even =
          fma2(a.x[4 * j], a.x[4 * j + 2], Codes::pair(q & 0x00ff00ff), even);
      odd = fma2(
          a.x[4 * j + 1],
          a.x[4 * j + 3],
          Codes::pair((q >> 8) & 0x00ff00ff),
          odd);
    }
    float product = fma(-128.0f, a.sum, (even + odd) * Codes::inverse);
    return fma(float(w.d), product, y);
  }
};
