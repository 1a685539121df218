// Products of super-blocks with x in fixed point: R rows of weights by C rows
// of x. A lane adds up the same codes in every way that x may lie, so that
// results are equal to the bit.
#pragma once

#include <type_traits>

#include "cpu/codes_blocks.h"
#include "cpu/codes_super.h"
#include "cpu/fixed.h"

namespace mlx_gguf::cpu::MLX_GGUF_ISA {
namespace {

// f(integral_constant) for 0, 1, 2 and 3.
template <typename F>
inline __attribute__((always_inline)) void four_times(F&& f) {
  f(std::integral_constant<int, 0>{});
  f(std::integral_constant<int, 1>{});
  f(std::integral_constant<int, 2>{});
  f(std::integral_constant<int, 3>{});
}

// Places of the c-th 64 codes among a super-block's scales.
template <typename Type, int c>
struct ScaleOf {
  static constexpr int part = c, count = 256 / Codes<Type>::group;
  static constexpr int at(int chunk) {
    return Codes<Type>::chunk(c, chunk) * 16 / Codes<Type>::group;
  }
  static constexpr Table<int32_t, 16> lanes{[](int i) { return at(i / 4); }};
  // The low byte of every other word; the high one to keep a sign.
  static constexpr Table<uint8_t, 64> words{[](int i) {
    return i % 4 == int{Codes<Type>::signed_scales} ? at(i / 16) : 128;
  }};
  // A byte and a zero, which multiply_bytes needs; 128 gives the zero.
  static constexpr Table<uint8_t, 64> even{
      [](int i) { return i % 2 ? 128 : at(i / 16); }};
  static constexpr Table<uint8_t, 64> odd{
      [](int i) { return i % 2 ? at(i / 16) : 128; }};
};

// A super-block has sixteen products to a lane; where they could overflow, in
// two sums.
template <typename Type>
constexpr int parts_of = int64_t{Codes<Type>::largest_code} *
                                     Codes<Type>::largest_scale * 32767 * 16 >>
                                 31
                             ? 2
                             : 1;

// Whether x may lie in planes: codes without a sign, four of which by signed
// bytes add up to words where scales are to meet them.
template <typename Type>
constexpr bool in_planes = [] {
  using T = Codes<Type>;
  if constexpr (T::whole_scales) {
    return has_planes && !T::signed_codes && 4 * 128 * T::largest_code <= 32767;
  } else {
    return has_planes && !T::signed_codes;
  }
}();

// The bias that sums start with, where scales do not come between, or are in
// the products.
template <typename Type>
constexpr int bias_in_x =
    !counts_bias                 ? 0
    : Codes<Type>::byte_products ? Codes<Type>::product_bias
    : Codes<Type>::whole_scales  ? 0
                                 : Codes<Type>::bias;

// What sums of high (0) or low (1) words start at for the 64 codes from 64 c on
// and those after; of whole scales, for all 256.
template <typename Type>
Ints start(const FixedRow& x, int64_t at, int c, int low) {
  if constexpr (bias_in_x<Type> != 0) {
    return load64(x.starts + 64 * at + 16 * c + 16 * low);
  } else {
    return no_ints();
  }
}

// Whole numbers in R by C by n sums.
template <int R, int C, int n = 1>
struct IntSums {
  Ints at[R][C][n];
  IntSums() {
    MLX_GGUF_UNROLL
    for (int i = 0; i < R * C * n; ++i) {
      at[i / (C * n)][i / n % C][i % n] = no_ints();
    }
  }
  Floats floats(int r, int c) const {
    Floats out = to_floats(at[r][c][0]);
    if constexpr (n == 2) {
      out = add(out, to_floats(at[r][c][1]));
    }
    return out;
  }
};

inline Floats add_low(Ints low, Floats to, float unit = low_unit) {
  return multiply_add(to_floats(low), floats_of(unit), to);
}

// ---- Scales that are whole numbers. Results are in units of their factor.

template <typename Type>
inline auto scales_or_products(const uint8_t* b) {
  if constexpr (Codes<Type>::byte_products) {
    return Codes<Type>::products(b);
  } else {
    return Codes<Type>::scales(b);
  }
}

// 64 codes times scales, as dot() takes them.
template <typename Type, int c, typename Scales>
inline auto scaled_codes(const uint8_t* b, const Scales& scales_or_products) {
  using T = Codes<Type>;
  using Of = ScaleOf<Type, c>;
  if constexpr (T::byte_products) {
    return factors<false, Of>(T::template scaled<c>(b, scales_or_products));
  } else {
    Bytes codes = T::template codes<c>(b);
    return factors<T::signed_codes, Of>(codes, scales_or_products);
  }
}

template <typename Type, int R, int C, bool fine>
inline __attribute__((always_inline)) void whole_products(
    const uint8_t* const* b,
    const FixedRow* x,
    int64_t at,
    Floats (&out)[R][C]) {
  constexpr int parts = parts_of<Type>;
  decltype(scales_or_products<Type>(b[0])) scales[R];
  MLX_GGUF_UNROLL
  for (int r = 0; r < R; ++r) {
    scales[r] = scales_or_products<Type>(b[r]);
  }
  IntSums<R, C, parts> high;
  IntSums<R, C> low;
  if constexpr (bias_in_x<Type> != 0) {
    MLX_GGUF_UNROLL
    for (int i = 0; i < R * C; ++i) {
      high.at[i / C][i % C][0] = start<Type>(x[i % C], at, 0, 0);
      if constexpr (fine) {
        low.at[i / C][i % C][0] = start<Type>(x[i % C], at, 0, 1);
      }
    }
  }
  four_times([&](auto c) {
    MLX_GGUF_UNROLL
    for (int r = 0; r < R; ++r) {
      auto scaled = scaled_codes<Type, c>(b[r], scales[r]);
      MLX_GGUF_UNROLL
      for (int i = 0; i < C; ++i) {
        Ints& sum = high.at[r][i][c * parts / 4];
        sum = dot(sum, scaled, x[i].high + 256 * at + 64 * c);
        if constexpr (fine) {
          Ints& sum = low.at[r][i][0];
          sum = dot(sum, scaled, x[i].low + 256 * at + 64 * c);
        }
      }
    }
  });
  MLX_GGUF_UNROLL
  for (int i = 0; i < R * C; ++i) {
    Floats& to = out[i / C][i % C];
    to = high.floats(i / C, i % C);
    if constexpr (fine) {
      to = add_low(low.at[i / C][i % C][0], to);
    }
  }
}

// ---- Scales in floats, which `shared` times 64 codes have in common; from the
// `first` 64 weights on.

// Adds whole sums times their scale.
template <typename Type, int c, bool fine>
inline void add_scaled(
    Ints high,
    Ints low,
    HalfFloats scales,
    const float& x_scale,
    Floats& to,
    float unit = low_unit) {
  Floats sum = to_floats(high);
  if constexpr (fine) {
    sum = add_low(low, sum, unit);
  }
  if constexpr (Codes<Type>::far_scales) {
    sum = multiply(sum, floats_of(x_scale));
  }
  to = multiply_add(sum, pick<ScaleOf<Type, c>>(scales), to);
}

template <typename Type, int R, int C, bool fine, int first>
inline __attribute__((always_inline)) void float_products(
    const uint8_t* const* b,
    const FixedRow* x,
    int64_t at,
    Floats (&out)[R][C]) {
  using T = Codes<Type>;
  MLX_GGUF_UNROLL
  for (int r = 0; r < R; ++r) {
    HalfFloats scales = T::scales(b[r]);
    IntSums<1, C> high, low;
    MLX_GGUF_UNROLL
    for (Floats& to : out[r]) {
      to = floats_of(0);
    }
    four_times([&](auto c) {
      if constexpr (c < first) {
        return;
      }
      using Of = ScaleOf<Type, c>;
      constexpr bool begins = c % T::shared == 0;
      constexpr bool ends = (c + 1) % T::shared == 0;
      auto plain = factors<T::signed_codes, Of>(T::template codes<c>(b[r]));
      MLX_GGUF_UNROLL
      for (int i = 0; i < C; ++i) {
        Ints &h = high.at[0][i][0], &l = low.at[0][i][0];
        int64_t words = 256 * at + 64 * c;
        h = dot(
            begins ? start<Type>(x[i], at, c, 0) : h, plain, x[i].high + words);
        if constexpr (fine) {
          l =
              dot(begins ? start<Type>(x[i], at, c, 1) : l,
                  plain,
                  x[i].low + words);
        }
        if constexpr (ends) {
          add_scaled<Type, c, fine>(h, l, scales, x[i].scales[at], out[r][i]);
        }
      }
    });
  }
}

// ---- Any.

// Of one row of x in planes: fixed_planes.h, where there are any.
template <typename Type, int R, int planes>
inline __attribute__((always_inline)) void whole_plane_products(
    const uint8_t* const* b,
    const FixedRow& x,
    int64_t at,
    Floats (&out)[R][1]);
template <typename Type, int R, int planes, int first>
inline __attribute__((always_inline)) void float_plane_products(
    const uint8_t* const* b,
    const FixedRow& x,
    int64_t at,
    Floats (&out)[R][1]);

// The way of C rows of x: one that needs no low words has zeros there.
template <int C>
Way way_of(const FixedRow* x, int64_t at) {
  Way way = x[0].way[at];
  MLX_GGUF_UNROLL
  for (int c = 1; c < C; ++c) {
    way = x[c].way[at] == Way::fine_words ? Way::fine_words : way;
  }
  return way;
}

// Rows whose sums are in registers together: others are needed too.
template <typename Type, int R, int C, Way way>
constexpr int rows_together() {
  if (!many_registers) {
    return 1;
  }
  if constexpr (!Codes<Type>::whole_scales) {
    return R;
  } else {
    constexpr int parts = parts_of<Type>, fine = is_fine(way);
    int sums = planes_of(way) ? planes_of(way) * parts : C * (parts + fine);
    int rows = R;
    while (rows > 1 && rows * sums > 12) {
      rows /= 2;
    }
    return rows;
  }
}

// Products with the at-th block of x, lane by lane, in units of the scales of
// both.
template <typename Type, int R, int C, Way way, int first>
inline __attribute__((always_inline)) void find_products(
    const uint8_t* const* b,
    const FixedRow* x,
    int64_t at,
    Floats (&out)[R][C]) {
  constexpr bool whole = Codes<Type>::whole_scales, fine = is_fine(way);
  if constexpr (planes_of(way) && whole) {
    whole_plane_products<Type, R, planes_of(way)>(b, x[0], at, out);
  } else if constexpr (planes_of(way)) {
    float_plane_products<Type, R, planes_of(way), first>(b, x[0], at, out);
  } else if constexpr (whole) {
    whole_products<Type, R, C, fine>(b, x, at, out);
  } else {
    float_products<Type, R, C, fine, first>(b, x, at, out);
  }
}

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA
