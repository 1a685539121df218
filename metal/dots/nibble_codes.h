// Q4_0, Q4_1, Q5_0 and Q5_1 without converts: 16 cohorts of 2 lanes, a block
// each. A lane has 8 contiguous bytes: 8 weights of each half of the block.
#pragma once
#include "../formats/blocks32.h"
#include "codes.h"

template <bool MIN, bool FIFTH, typename Codes>
struct CodeDot<Nibbles<MIN, FIFTH>, Codes> {
  typedef Nibbles<MIN, FIFTH> F;
  typedef ushort Element;
  static constant constexpr ushort lanes = 2;
  static constant constexpr ushort unit = 32;
  static constant constexpr ushort table_size = 0;
  static uint stride(uint K) {
    return K / 32 * (F::bytes / 2);
  }

  struct Weights {
    uint q[2];
    uint fifth; // byte 0 for the low halves of q, byte 2 for the high
    half d;
    half m;
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
    uint i = row + F::bytes / 2 * u;
    out.d = as_type<half>(base[i]);
    out.m = MIN ? as_type<half>(base[i + 1]) : half(0.0f);
    out.fifth = FIFTH ? word(base, i + F::fifth_at) >> (8 * it) : 0;
    UNROLL
    for (ushort j = 0; j < 2; ++j) {
      out.q[j] = word(base, i + F::qs_at + 4 * it + 2 * j);
    }
  }

  template <typename T>
  static void load_x(
      device const T* x, uint i, uint it, uint, thread Acts<T>& out) {
    float sum = 0.0f;
    UNROLL
    for (ushort j = 0; j < 16; ++j) {
      out.x[j] = Held<T>(x[i + 8 * it + 16 * (j / 8) + j % 8]);
      sum += float(out.x[j]);
    }
    out.sum = sum;
  }

  template <typename T>
  static float dot(thread const Weights& w, thread const Acts<T>& a, float y) {
    // Bit n of a byte of `fifth`, of weight n, goes to 4 + n for the first
    // weight of a pair and to 18 + n for the second, which has n + 2.
    uint low_bits = (w.fifth & 0xff) * 0x00040010;
    uint high_bits = ((w.fifth >> 16) & 0xff) * 0x00040010;
    float low = 0.0f, high = 0.0f; // over inverse; high times 16
    UNROLL
    for (ushort j = 0; j < 2; ++j) {
      UNROLL
      for (ushort odd = 0; odd < 2; ++odd) {
        uint q = w.q[j] >> (8 * odd);
        ushort i = 4 * j + odd;
        uint code = q & 0x000f000f, code16 = q & 0x00f000f0;
        if (FIFTH) {
          code |= (low_bits >> i) & 0x00100010;
          code16 |= ((high_bits >> i) & 0x00100010) << 4;
        }
        low = fma2(a.x[i], a.x[i + 2], Codes::pair(code), low);
        high = fma2(a.x[i + 8], a.x[i + 10], Codes::pair(code16), high);
      }
    }
    float codes = fma(high, 1.0f / 16, low) * Codes::inverse;
    if (MIN) {
      return fma(float(w.d), codes, fma(float(w.m), a.sum, y));
    }
    return fma(float(w.d), fma(-F::bias, a.sum, codes), y);
  }
};
