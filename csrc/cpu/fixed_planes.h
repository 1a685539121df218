// Products with a row of x that lies in planes of bytes.
#pragma once

#include "cpu/fixed_products.h"

namespace mlx_gguf::cpu::MLX_GGUF_ISA {
namespace {

// Of the sums of the planes after the first two.
template <int planes>
constexpr float unit_of_low = planes == 3 ? 1.0f / 256 : low_unit;

// whole_products of one row of x. Chains of sums are short and rows take turns:
// what waits for a sum fills the scheduler.
template <typename Type, int R, int planes>
inline __attribute__((always_inline)) void whole_plane_products(
    const uint8_t* const* b,
    const FixedRow& x,
    int64_t at,
    Floats (&out)[R][1]) {
  using T = Codes<Type>;
  constexpr int parts = parts_of<Type>;
  const int8_t* high = x.planes_at(x.high, at);
  const int8_t* low = x.planes_at(x.low, at);
  decltype(scales_or_products<Type>(b[0])) scales[R];
  MLX_GGUF_UNROLL
  for (int r = 0; r < R; ++r) {
    scales[r] = scales_or_products<Type>(b[r]);
  }
  IntSums<R, planes, parts> sums;
  if constexpr (bias_in_x<Type> != 0) {
    MLX_GGUF_UNROLL
    for (auto& of : sums.at) {
      of[1][0] = start<Type>(x, at, 0, 0);
      if constexpr (planes > 2) {
        of[planes - 1][0] = start<Type>(x, at, 0, 1);
      }
    }
  }
  four_times([&](auto c) {
    MLX_GGUF_UNROLL
    for (int r = 0; r < R; ++r) {
      auto add = [&](int to, const int8_t* plane) {
        Ints& sum = sums.at[r][to][c * parts / 4];
        if constexpr (T::byte_products) {
          Bytes codes = T::template scaled<c>(b[r], scales[r]);
          sum = dot_bytes(sum, codes, plane + 64 * c);
        } else {
          Bytes codes = T::template codes<c>(b[r]);
          Words by = shuffle(scales[r], load64(ScaleOf<Type, c>::words.at));
          sum = dot(sum, dot_bytes(no_ints(), codes, plane + 64 * c), by);
        }
      };
      add(0, high);
      add(1, high + 256);
      if constexpr (planes == 4) {
        add(2, low);
        add(3, low + 256);
      } else if constexpr (planes == 3) {
        add(2, low + 256);
      }
    }
  });
  // The first plane counts 256 times. So do scales with a sign.
  constexpr bool raised = T::signed_scales && !T::byte_products;
  auto last = [](Ints sum) { return raised ? shift_ints_right<8>(sum) : sum; };
  auto join = [&](Ints first, Ints second) {
    Ints up = raised ? first : shift_ints_left<8>(first);
    return add_ints(up, last(second));
  };
  MLX_GGUF_UNROLL
  for (int r = 0; r < R; ++r) {
    auto& of = sums.at[r];
    MLX_GGUF_UNROLL
    for (int p = 0; p < parts; ++p) {
      MLX_GGUF_UNROLL
      for (int i = 0; i < planes; i += 2) {
        of[i][p] =
            i + 1 < planes ? join(of[i][p], of[i + 1][p]) : last(of[i][p]);
      }
    }
    out[r][0] = sums.floats(r, 0);
    if constexpr (planes > 2) {
      Ints rest = parts == 1 ? of[2][0] : add_ints(of[2][0], of[2][parts - 1]);
      out[r][0] = add_low(rest, out[r][0], unit_of_low<planes>);
    }
  }
}

// float_products of one row of x.
template <typename Type, int R, int planes, int first>
inline __attribute__((always_inline)) void float_plane_products(
    const uint8_t* const* b,
    const FixedRow& x,
    int64_t at,
    Floats (&out)[R][1]) {
  using T = Codes<Type>;
  static_assert(T::shared == 2);
  HalfFloats scales[R];
  MLX_GGUF_UNROLL
  for (int r = 0; r < R; ++r) {
    scales[r] = T::scales(b[r]);
    out[r][0] = floats_of(0);
  }
  four_times([&](auto c) {
    if constexpr (c < first || c % 2) {
      return;
    } else {
      MLX_GGUF_UNROLL
      for (int r = 0; r < R; ++r) {
        Bytes codes = T::template codes<c>(b[r]);
        Bytes more = T::template codes<c + 1>(b[r]);
        auto add = [&](Ints sum, const int8_t* x) {
          return dot_bytes(dot_bytes(sum, codes, x), more, x + 64);
        };
        auto sum = [&](const int16_t* words, int is_low, bool two) {
          const int8_t* plane = x.planes_at(words, at) + 64 * c;
          Ints second = add(start<Type>(x, at, c, is_low), plane + 256);
          Ints high = add(no_ints(), plane);
          return two ? add_ints(shift_ints_left<8>(high), second) : second;
        };
        constexpr bool fine = planes > 2;
        Ints rest = fine ? sum(x.low, 1, planes == 4) : no_ints();
        add_scaled<Type, c, fine>(
            sum(x.high, 0, true),
            rest,
            scales[r],
            x.scales[at],
            out[r][0],
            unit_of_low<planes>);
      }
    }
  });
}

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA
