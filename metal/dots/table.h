// Types whose codes index a table, with the table in threadgroup memory.
#pragma once
#include "../rows.h"

// The types of 32 weights: 16 cohorts of 2 lanes, a block each. A lane has 8
// contiguous bytes: 8 weights of each half of the block.
template <typename F>
struct TableDot {
  typedef typename F::Element Element;
  static constant constexpr ushort lanes = 2;
  static constant constexpr ushort unit = 32;
  static constant constexpr ushort table_size = 16;
  static constant constexpr ushort elements = F::bytes / sizeof(Element);
  static uint stride(uint K) {
    return K / 32 * elements;
  }

  struct Weights {
    float w[16];
    float scale;
  };
  template <typename T>
  struct Acts {
    Held<T> x[16];
  };

  static void fill(threadgroup float* table, uint i) {
    if (i < 16) {
      table[i] = F::value(i);
    }
  }

  static void load(
      device const Element* base,
      uint row,
      uint u,
      uint it,
      uint,
      threadgroup const float* table,
      thread Weights& out) {
    uint i = row + elements * u;
    out.scale = F::scale(base, i);
    UNROLL
    for (ushort j = 0; j < 8; j += 4) {
      uint q = F::codes(base, i, 8 * it + j);
      uchar4 low = as_type<uchar4>(q & 0x0f0f0f0f);
      uchar4 high = as_type<uchar4>((q >> 4) & 0x0f0f0f0f);
      UNROLL
      for (ushort b = 0; b < 4; ++b) {
        out.w[j + b] = table[low[b]];
        out.w[8 + j + b] = table[high[b]];
      }
    }
  }

  template <typename T>
  static void load_x(
      device const T* x, uint i, uint it, uint, thread Acts<T>& out) {
    UNROLL
    for (ushort j = 0; j < 16; ++j) {
      out.x[j] = Held<T>(x[i + 8 * it + 16 * (j / 8) + j % 8]);
    }
  }

  template <typename T>
  static float dot(thread const Weights& w, thread const Acts<T>& a, float y) {
    float even = 0.0f, odd = 0.0f;
    UNROLL
    for (ushort i = 0; i < 16; i += 2) {
      even = fma(float(a.x[i]), w.w[i], even);
      odd = fma(float(a.x[i + 1]), w.w[i + 1], odd);
    }
    return fma(w.scale, even + odd, y);
  }
};

// 4 cohorts of 8 lanes, a block each; a lane has the 16 contiguous bytes of one
// scale group.
template <>
struct TableDot<IQ4_XS> {
  typedef uint Element;
  static constant constexpr ushort lanes = 8;
  static constant constexpr ushort unit = 256;
  static constant constexpr ushort table_size = 16;
  static uint stride(uint K) {
    return K / 256 * 34;
  }

  struct Weights {
    float w[32];
    float scale;
  };
  template <typename T>
  struct Acts {
    Held<T> x[32];
  };

  static void fill(threadgroup float* table, uint i) {
    if (i < 16) {
      table[i] = iq4_values[i];
    }
  }

  static void load(
      device const uint* base,
      uint row,
      uint u,
      uint it,
      uint,
      threadgroup const float* table,
      thread Weights& out) {
    uint i = row + 34 * u;
    out.scale = IQ4_XS::scale(base[i], base[i + 1], it);
    UNROLL
    for (ushort j = 0; j < 4; ++j) {
      uint q = base[i + 2 + 4 * it + j];
      uchar4 low = as_type<uchar4>(q & 0x0f0f0f0f);
      uchar4 high = as_type<uchar4>((q >> 4) & 0x0f0f0f0f);
      UNROLL
      for (ushort b = 0; b < 4; ++b) {
        out.w[4 * j + b] = table[low[b]];
        out.w[16 + 4 * j + b] = table[high[b]];
      }
    }
  }

  template <typename T>
  static void load_x(
      device const T* x, uint i, uint it, uint, thread Acts<T>& out) {
    UNROLL
    for (ushort j = 0; j < 32; ++j) {
      out.x[j] = Held<T>(x[i + 32 * it + j]);
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
    return fma(w.scale, even + odd, y);
  }
};
