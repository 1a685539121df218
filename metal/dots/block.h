// The dot of types without one of their own: a lane decodes 32 weights (8 of a
// plain type) and multiplies them by their x.
//
// What every dot offers to gemv:
//   Element        what a row is read as; base + 32-bit index, no 64-bit sums
//   lanes          lanes that share one unit of a row
//   unit, stride   weights and Elements of a unit
//   table_size     floats of threadgroup memory that fill() sets, or 0
//   Weights, load  a lane's share of a unit of one row, as it lies in memory
//   Acts, load_x   the same of x, with what all rows need of it
//   dot            y plus their product
// `left` is what K has from this unit on; only plain types look at it.
#pragma once
#include "../rows.h"

template <typename F>
struct BlockDot {
  typedef uchar Element;
  static constant constexpr ushort lanes = 1;
  static constant constexpr ushort unit = 32;
  static constant constexpr ushort table_size = 0;
  static uint stride(uint K) {
    return K / F::block * F::bytes;
  }

  struct Weights {
    float w[32];
  };
  template <typename T>
  struct Acts {
    Held<T> x[32];
  };

  static void fill(threadgroup float*, uint) {}

  static void load(
      device const uchar* base,
      uint row,
      uint u,
      uint,
      uint,
      threadgroup const float*,
      thread Weights& out) {
    uint units = F::block / 32;
    device const uchar* block = base + (row + u / units * F::bytes);
    F::decode(block, 2 * (u % units), out.w);
    F::decode(block, 2 * (u % units) + 1, out.w + 16);
  }

  template <typename T>
  static void load_x(
      device const T* x, uint i, uint, uint, thread Acts<T>& out) {
    UNROLL
    for (ushort j = 0; j < 32; ++j) {
      out.x[j] = Held<T>(x[i + j]);
    }
  }

  template <typename T>
  static float dot(thread const Weights& w, thread const Acts<T>& a, float y) {
    float even = 0.0f, odd = 0.0f;
    UNROLL
    for (ushort i = 0; i < 32; i += 2) {
      even = fma(float(a.x[i]), w.w[i], even);
      odd = fma(float(a.x[i + 1]), w.w[i + 1], odd);
    }
    return y + (even + odd);
  }
};

template <typename S>
struct BlockDot<Plain<S>> {
  typedef S Element;
  static constant constexpr ushort lanes = 1;
  static constant constexpr ushort unit = 8;
  static constant constexpr ushort table_size = 0;
  static uint stride(uint K) {
    return K;
  }

  struct Weights {
    S w[8];
  };
  template <typename T>
  struct Acts {
    Held<T> x[8];
  };

  static void fill(threadgroup float*, uint) {}

  static void load(
      device const S* base,
      uint row,
      uint u,
      uint,
      uint left,
      threadgroup const float*,
      thread Weights& out) {
    uint i = row + 8 * u;
    UNROLL
    for (ushort j = 0; j < 8; ++j) {
      out.w[j] = left >= 8 || j < left ? base[i + j] : S(0.0f);
    }
  }

  template <typename T>
  static void load_x(
      device const T* x, uint i, uint, uint left, thread Acts<T>& out) {
    UNROLL
    for (ushort j = 0; j < 8; ++j) {
      out.x[j] = left >= 8 || j < left ? Held<T>(x[i + j]) : Held<T>(0.0f);
    }
  }

  template <typename T>
  static float dot(thread const Weights& w, thread const Acts<T>& a, float y) {
    float even = 0.0f, odd = 0.0f;
    UNROLL
    for (ushort i = 0; i < 8; i += 2) {
      even = fma(float(a.x[i]), float(w.w[i]), even);
      odd = fma(float(a.x[i + 1]), float(w.w[i + 1]), odd);
    }
    return y + (even + odd);
  }
};
