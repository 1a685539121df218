// The gemv on codes.h and fixed.h: 1 to 8 rows of x for every read of the
// weights. A value depends on its row of x and of w alone: whole numbers are
// summed exactly, and floats in the same order for any number of rows.
#pragma once

#include <new>
#include <type_traits>

#include "cpu/codes.h"
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
  // A byte and a zero, which multiply_bytes needs; 128 gives the zero.
  static constexpr Table<uint8_t, 64> even{
      [](int i) { return i % 2 ? 128 : at(i / 16); }};
  static constexpr Table<uint8_t, 64> odd{
      [](int i) { return i % 2 ? at(i / 16) : 128; }};
};

template <typename Type>
constexpr bool has_offsets = Codes<Type>::has_mins || Codes<Type>::bias != 0;

// What sums of x times mins (or scales) are multiplied by at last.
template <typename Type>
constexpr float offset_factor = !Codes<Type>::has_mins      ? -Codes<Type>::bias
                                : Codes<Type>::whole_scales ? -1
                                                            : 1;

template <typename Type>
constexpr int64_t super_bytes = 256 / Type::size * Type::bytes;

// The super-blocks of a row of weights. What does not fill one at the end is
// found as fix() lays x.
template <typename Type>
class Row {
 public:
  Row(const uint8_t* w, int64_t K) : w_(w), full_(K / 256) {
    tail_ = w + (K - 256) / Type::size * Type::bytes;
    if (K < 256) {
      std::memset(padded_, 0, sizeof(padded_));
      std::memcpy(padded_, w, K / Type::size * Type::bytes);
      tail_ = padded_;
    }
  }
  const uint8_t* operator[](int64_t b) const {
    return b < full_ ? w_ + b * super_bytes<Type> : tail_;
  }

 private:
  const uint8_t* w_;
  const uint8_t* tail_;
  int64_t full_;
  alignas(64) uint8_t padded_[super_bytes<Type>];
};

// f16 factors of R super-blocks of whole scales as floats: of scales at
// 2 r + d_place, of mins beside them.
template <typename Type, int R>
struct Factors {
  alignas(32) float at[8];
  explicit Factors(const uint8_t* const* b) {
    auto two = [&](int r) {
      return read<int32_t>(b[r < R ? r : 0] + Codes<Type>::factors_at);
    };
    Quarter all = quarter_of(two(0), two(1), two(2), two(3));
    store_eight(at, floats_of_halves(all));
  }
  float d(int r) const {
    return at[2 * r + Codes<Type>::d_place];
  }
  // Of what the sums of x are multiplied by.
  float of_offsets(int r) const {
    return Codes<Type>::has_mins ? at[2 * r + 1 - Codes<Type>::d_place] : d(r);
  }
};

// Scales in floats have none.
template <typename Type, int R>
  requires(!Codes<Type>::whole_scales)
struct Factors<Type, R> {
  explicit Factors(const uint8_t* const*) {}
};

// Sums along R rows of weights by C rows of x, lane by lane. Those of mins (or
// scales) by sums of x, where 8 make a row, hold two rows to a vector.
template <typename Type, int R, int C>
struct Sums {
  static constexpr bool in_pairs = Codes<Type>::group == 32;
  static constexpr int offset_vectors = in_pairs ? (R + 1) / 2 : R;
  Floats products[R][C];
  Floats offsets[offset_vectors][C];
  Sums() {
    MLX_GGUF_UNROLL
    for (int c = 0; c < C; ++c) {
      MLX_GGUF_UNROLL
      for (auto& row : products) {
        row[c] = floats_of(0);
      }
      MLX_GGUF_UNROLL
      for (auto& row : offsets) {
        row[c] = floats_of(0);
      }
    }
  }
  float total(int r, int c) const {
    HalfFloats all = fold(products[r][c]);
    if constexpr (has_offsets<Type>) {
      HalfFloats o;
      if constexpr (in_pairs) {
        const Floats& two = offsets[r / 2][c];
        o = r % 2 ? second_half(two) : first_half(two);
      } else {
        o = fold(offsets[r][c]);
      }
      all = multiply_add(o, eight_of(offset_factor<Type>), all);
    }
    return sum_lanes(all);
  }
};

// Adds mins (or scales, where there is a bias) times sums of x.
template <typename Type, int R, int C>
inline __attribute__((always_inline)) void add_offsets(
    const uint8_t* const* b,
    const Factors<Type, R>& factors,
    const FixedRow* x,
    int64_t at,
    Sums<Type, R, C>& sums) {
  using T = Codes<Type>;
  constexpr bool in_pairs = Sums<Type, R, C>::in_pairs;
  auto of = [](const uint8_t* b) {
    if constexpr (T::has_mins) {
      return T::mins(b);
    } else if constexpr (T::whole_scales) {
      return first_quarter(T::scales(b));
    } else {
      return T::scales(b);
    }
  };
  MLX_GGUF_UNROLL
  for (int i = 0; i < sums.offset_vectors; ++i) {
    Floats o;
    if constexpr (in_pairs) {
      int first = 2 * i, second = R == 1 ? 0 : 2 * i + 1;
      if constexpr (T::whole_scales) {
        Quarter both = first_eighths(of(b[first]), of(b[second]));
        o = multiply(
            floats_of_bytes(both),
            floats_of(factors.of_offsets(first), factors.of_offsets(second)));
      } else {
        o = two_halves(of(b[first]), of(b[second]));
      }
    } else {
      o = multiply(floats_of_bytes(of(b[i])), floats_of(factors.of_offsets(i)));
    }
    MLX_GGUF_UNROLL
    for (int c = 0; c < C; ++c) {
      Floats s = in_pairs ? repeat_floats(x[c].sums32 + 8 * at)
                          : load_floats(x[c].sums16 + 16 * at);
      sums.offsets[i][c] = multiply_add(o, s, sums.offsets[i][c]);
    }
  }
}

// C sums of codes times scales times x over a super-block of whole scales, to
// be multiplied by its factor.
template <typename Type, int C, bool fine>
inline __attribute__((always_inline)) void whole_products(
    const uint8_t* b, const FixedRow* x, int64_t at, Floats* out) {
  using T = Codes<Type>;
  // Sixteen products to a lane; where they could overflow, in two sums.
  constexpr int parts = int64_t(T::largest) * 32767 * 16 >> 31 ? 2 : 1;
  Bytes scales = T::scales(b);
  Ints high[C][parts], low[C];
  MLX_GGUF_UNROLL
  for (int i = 0; i < C; ++i) {
    MLX_GGUF_UNROLL
    for (Ints& part : high[i]) {
      part = no_ints();
    }
    low[i] = no_ints();
  }
  four_times([&](auto c) {
    Bytes codes = T::template codes<c>(b);
    auto scaled = factors<T::signed_codes, ScaleOf<Type, c>>(codes, scales);
    MLX_GGUF_UNROLL
    for (int i = 0; i < C; ++i) {
      auto add = [&](Ints& sum, const int16_t* words) {
        sum = dot(sum, scaled, words);
      };
      add(high[i][c * parts / 4], x[i].high + 256 * at + 64 * c);
      if constexpr (fine) {
        add(low[i], x[i].low + 256 * at + 64 * c);
      }
    }
  });
  MLX_GGUF_UNROLL
  for (int i = 0; i < C; ++i) {
    out[i] = to_floats(high[i][0]);
    MLX_GGUF_UNROLL
    for (int p = 1; p < parts; ++p) {
      out[i] = add(out[i], to_floats(high[i][p]));
    }
    if constexpr (fine) {
      out[i] = multiply_add(to_floats(low[i]), floats_of(low_unit), out[i]);
    }
  }
}

// The same of scales in floats, from the `first` 64 weights on.
template <typename Type, int C, bool fine, int first>
inline __attribute__((always_inline)) void float_products(
    const uint8_t* b, const FixedRow* x, int64_t at, Floats* out) {
  using T = Codes<Type>;
  HalfFloats scales = T::scales(b);
  MLX_GGUF_UNROLL
  for (int i = 0; i < C; ++i) {
    out[i] = floats_of(0);
  }
  four_times([&](auto c) {
    if constexpr (c < first) {
      return;
    }
    using Of = ScaleOf<Type, c>;
    auto plain = factors<T::signed_codes, Of>(T::template codes<c>(b));
    Floats scale = pick<Of>(scales);
    MLX_GGUF_UNROLL
    for (int i = 0; i < C; ++i) {
      auto sum = [&](const int16_t* words) {
        return to_floats(dot(no_ints(), plain, words));
      };
      Floats s = sum(x[i].high + 256 * at + 64 * c);
      if constexpr (fine) {
        Floats low = sum(x[i].low + 256 * at + 64 * c);
        s = multiply_add(low, floats_of(low_unit), s);
      }
      if constexpr (T::far_scales) {
        s = multiply(s, floats_of(x[i].scales[at]));
      }
      out[i] = multiply_add(s, scale, out[i]);
    }
  });
}

// Bytes ahead of those in work that are asked for: a processor that computes
// does not look far enough ahead by itself.
constexpr int64_t ahead = 2048;

inline void prefetch(const uint8_t* p, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += 64) {
    __builtin_prefetch(p + line);
  }
}

// R rows of weights, `stride` bytes apart, by C rows of x. Memory is read
// faster in several places at a time than in one.
template <typename Type, int R, int C>
void gemv_rows(
    const uint8_t* w,
    int64_t stride,
    int64_t K,
    const FixedRow* x,
    float (&y)[R][C]) {
  using T = Codes<Type>;
  alignas(Row<Type>) std::byte memory[R][sizeof(Row<Type>)];
  auto rows = reinterpret_cast<Row<Type>*>(memory);
  MLX_GGUF_UNROLL
  for (int r = 0; r < R; ++r) {
    new (rows + r) Row<Type>(w + r * stride, K);
  }
  Sums<Type, R, C> sums;
  // The last 256 weights may have x in their second half alone.
  int64_t rest = K > 256 ? K % 256 : 0;
  int64_t half = rest && rest <= 128 ? x[0].n - 1 : -1;
  for (int64_t at = 0; at < x[0].n; ++at) {
    const uint8_t* b[R];
    MLX_GGUF_UNROLL
    for (int r = 0; r < R; ++r) {
      b[r] = rows[r][at];
      prefetch(b[r] + ahead, super_bytes<Type>);
    }
    Factors<Type, R> factors(b);
    bool fine = false;
    MLX_GGUF_UNROLL
    for (int c = 0; c < C; ++c) {
      fine |= x[c].fine[at];
    }
    // A row that needs no low words has zeros there: both ways are equal.
    auto run = [&](auto is_fine, auto first) __attribute__((always_inline)) {
      MLX_GGUF_UNROLL
      for (int r = 0; r < R; ++r) {
        Floats products[C];
        float d = 1;
        if constexpr (T::whole_scales) {
          whole_products<Type, C, is_fine>(b[r], x, at, products);
          d = factors.d(r);
        } else {
          float_products<Type, C, is_fine, first>(b[r], x, at, products);
        }
        MLX_GGUF_UNROLL
        for (int c = 0; c < C; ++c) {
          float scale = T::far_scales ? 1 : x[c].scales[at] * d;
          sums.products[r][c] =
              multiply_add(products[c], floats_of(scale), sums.products[r][c]);
        }
      }
    };
    using All = std::integral_constant<int, 0>;
    using Half = std::integral_constant<int, T::whole_scales ? 0 : 2>;
    if (Half{} && at == half) {
      fine ? run(std::true_type{}, Half{}) : run(std::false_type{}, Half{});
    } else {
      fine ? run(std::true_type{}, All{}) : run(std::false_type{}, All{});
    }
    if constexpr (has_offsets<Type>) {
      add_offsets<Type, R, C>(b, factors, x, at, sums);
    }
  }
  MLX_GGUF_UNROLL
  for (int r = 0; r < R; ++r) {
    MLX_GGUF_UNROLL
    for (int c = 0; c < C; ++c) {
      y[r][c] = sums.total(r, c);
    }
  }
}

// y[c][r] for n rows of weights by C rows of x: R places of the rows at a time,
// and what is left one by one.
template <typename Type, int R, int C>
void gemv_columns(
    const uint8_t* w,
    int64_t row_bytes,
    int64_t n,
    int64_t K,
    const FixedRow* x,
    float* y,
    int64_t y_stride) {
  int64_t each = n / R;
  for (int64_t i = 0; i < each; ++i) {
    float to[R][C];
    gemv_rows<Type, R, C>(w + i * row_bytes, each * row_bytes, K, x, to);
    MLX_GGUF_UNROLL
    for (int r = 0; r < R; ++r) {
      MLX_GGUF_UNROLL
      for (int c = 0; c < C; ++c) {
        y[c * y_stride + r * each + i] = to[r][c];
      }
    }
  }
  for (int64_t i = each * R; i < n; ++i) {
    float to[1][C];
    gemv_rows<Type, 1, C>(w + i * row_bytes, 0, K, x, to);
    MLX_GGUF_UNROLL
    for (int c = 0; c < C; ++c) {
      y[c * y_stride + i] = to[0][c];
    }
  }
}

// At most four rows of x at a time: the weights come from memory once, for they
// stay in the cache between.
template <typename Type>
void gemv(
    const uint8_t* w,
    int64_t row_bytes,
    int64_t n,
    int64_t K,
    const void* const* x,
    int64_t M,
    float* y,
    int64_t y_stride) {
  alignas(FixedRow) std::byte memory[max_fixed_rows][sizeof(FixedRow)];
  auto rows = reinterpret_cast<FixedRow*>(memory);
  for (int64_t m = 0; m < M; ++m) {
    new (rows + m) FixedRow(x[m], K);
  }
  for (int64_t m = 0; m < M;) {
    int64_t count = M - m >= 4 ? 4 : M - m >= 2 ? 2 : 1;
    auto run = count == 4   ? gemv_columns<Type, 1, 4>
               : count == 2 ? gemv_columns<Type, 2, 2>
                            : gemv_columns<Type, 4, 1>;
    run(w, row_bytes, n, K, rows + m, y + m * y_stride, y_stride);
    m += count;
  }
}

template <typename Type>
struct Order {
  static constexpr Table<uint8_t, 16> table{
      [](int i) { return Codes<Type>::chunk(i / 4, i % 4); }};
};

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA
