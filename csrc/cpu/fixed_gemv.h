// The gemv on codes.h and fixed.h: 1 to 8 rows of x for every read of the
// weights. A value depends on its row of x and of w alone: whole numbers are
// summed exactly, and floats in the same order for any number of rows.
#pragma once

#include "cpu/fixed_products.h"
#ifdef __AVX512VNNI__
#include "cpu/fixed_planes.h"
#endif

namespace mlx_gguf::cpu::MLX_GGUF_ISA {
namespace {

template <typename Type>
constexpr bool has_offsets =
    Codes<Type>::has_mins || (Codes<Type>::bias != 0 && bias_in_x<Type> == 0);

// What sums of x times mins (or scales) are multiplied by at last.
template <typename Type>
constexpr float offset_factor = !Codes<Type>::has_mins      ? -Codes<Type>::bias
                                : Codes<Type>::whole_scales ? -1
                                                            : 1;

template <typename Type>
constexpr int64_t super_bytes = 256 / Type::size * Type::bytes;

// The last 256 weights of a row, as fix() lays x: some are in the super-block
// before too. A shorter row is copied to `padded`.
template <typename Type>
const uint8_t* last_block(const uint8_t* w, int64_t K, uint8_t* padded) {
  if (K >= 256) {
    return w + (K - 256) / Type::size * Type::bytes;
  }
  std::memset(padded, 0, super_bytes<Type>);
  std::memcpy(padded, w, K / Type::size * Type::bytes);
  return padded;
}

// f16 factors of R super-blocks of whole scales as floats: of scales at
// 2 r + d_place, of mins beside them.
template <typename Type, int R>
struct Factors {
  HalfFloats all;
  alignas(32) float at[8];
  explicit Factors(const uint8_t* const* b) {
    auto two = [&](int r) {
      return read<int32_t>(b[r < R ? r : 0] + Codes<Type>::factors_at);
    };
    all = floats_of_halves(quarter_of(two(0), two(1), two(2), two(3)));
    store_eight(at, all);
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

// What products of R super-blocks of weights with C blocks of x are multiplied
// by. Kept in memory: compilers would move it about in registers, which costs
// more than loads do.
template <typename Type, int R, int C>
struct Scales {
  alignas(32) float at[C][8];
  Scales(const Factors<Type, R>& factors, const FixedRow* x, int64_t b) {
    MLX_GGUF_UNROLL
    for (int c = 0; c < C; ++c) {
      store_eight(at[c], multiply(factors.all, eight_of(x[c].scales[b])));
    }
    asm volatile("" : "+m"(at));
  }
  Floats operator()(int r, int c) const {
    return floats_of(at[c][2 * r + Codes<Type>::d_place]);
  }
};

template <typename Type, int R, int C>
  requires(!Codes<Type>::whole_scales)
struct Scales<Type, R, C> {
  float at[C];
  Scales(const Factors<Type, R>&, const FixedRow* x, int64_t b) {
    for (int c = 0; c < C; ++c) {
      at[c] = Codes<Type>::far_scales ? 1 : x[c].scales[b];
    }
  }
  Floats operator()(int, int c) const {
    return floats_of(at[c]);
  }
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

// Bytes ahead of those in work that are asked for: a processor that computes
// does not look far enough ahead by itself.
constexpr int64_t ahead = 2048;

inline void prefetch(const uint8_t* p, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += 64) {
    __builtin_prefetch(p + line);
  }
}

// Adds the products of R rows of weights, from super-blocks `from` on, with the
// blocks [at, end) of C rows of x, which all lie in one way. In a function of
// its own, so that its loop has all registers.
template <typename Type, int R, int C, Way way, int first>
__attribute__((noinline)) void add_blocks(
    const uint8_t* const* from,
    const FixedRow* x,
    int64_t at,
    int64_t end,
    Sums<Type, R, C>& to) {
  constexpr int together = rows_together<Type, R, C, way>();
  Sums<Type, R, C> sums = to;
  const uint8_t* b[R];
  std::memcpy(b, from, sizeof(b));
  for (; at < end; ++at) {
    MLX_GGUF_UNROLL
    for (int r = 0; r < R; ++r) {
      prefetch(b[r] + ahead, super_bytes<Type>);
    }
    Factors<Type, R> factors(b);
    Scales<Type, R, C> scales(factors, x, at);
    MLX_GGUF_UNROLL
    for (int r = 0; r < R; r += together) {
      Floats products[together][C];
      find_products<Type, together, C, way, first>(b + r, x, at, products);
      MLX_GGUF_UNROLL
      for (int i = 0; i < together * C; ++i) {
        int row = r + i / C, c = i % C;
        sums.products[row][c] = multiply_add(
            products[i / C][c], scales(row, c), sums.products[row][c]);
      }
    }
    if constexpr (has_offsets<Type>) {
      add_offsets<Type, R, C>(b, factors, x, at, sums);
    }
    MLX_GGUF_UNROLL
    for (int r = 0; r < R; ++r) {
      b[r] += super_bytes<Type>;
    }
  }
  to = sums;
}

// A single row of x lies in planes where it can.
template <typename Type, int R, int C, int first>
auto adder(Way way) {
  if constexpr (in_planes<Type> && C == 1) {
    return way == Way::planes2   ? add_blocks<Type, R, C, Way::planes2, first>
           : way == Way::planes3 ? add_blocks<Type, R, C, Way::planes3, first>
                                 : add_blocks<Type, R, C, Way::planes4, first>;
  } else {
    return is_fine(way) ? add_blocks<Type, R, C, Way::fine_words, first>
                        : add_blocks<Type, R, C, Way::words, first>;
  }
}

// R rows of weights by C rows of x.
template <typename Type, int R, int C>
void gemv_rows(
    const uint8_t* const* w, int64_t K, const FixedRow* x, float (&y)[R][C]) {
  Sums<Type, R, C> sums;
  const uint8_t* b[R];
  int64_t n = x[0].n, full = K / 256;
  for (int64_t at = 0, end; at < full; at = end) {
    Way way = way_of<C>(x, at);
    for (end = at + 1; end < full && way_of<C>(x, end) == way;) {
      ++end;
    }
    for (int r = 0; r < R; ++r) {
      b[r] = w[r] + at * super_bytes<Type>;
    }
    adder<Type, R, C, 0>(way)(b, x, at, end, sums);
  }
  if (full < n) {
    alignas(64) uint8_t padded[R][super_bytes<Type>];
    for (int r = 0; r < R; ++r) {
      b[r] = last_block<Type>(w[r], K, padded[r]);
    }
    // x may be in its second half alone.
    constexpr int half = Codes<Type>::whole_scales ? 0 : 2;
    bool in_half = full > 0 && K % 256 <= 128;
    auto add = in_half ? adder<Type, R, C, half> : adder<Type, R, C, 0>;
    add(way_of<C>(x, full))(b, x, full, n, sums);
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) {
      y[r][c] = sums.total(r, c);
    }
  }
}

// y[c][i] for n rows of weights by C rows of x, R rows of weights at a time
// from as many parts of them: memory is read faster in several places than in
// one. Where that does not come out even, the last row is computed again.
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
  auto run = [&](int64_t first, int64_t stride) {
    int64_t at[R];
    const uint8_t* rows[R];
    for (int r = 0; r < R; ++r) {
      at[r] = first + r * stride < n ? first + r * stride : n - 1;
      rows[r] = w + at[r] * row_bytes;
    }
    float to[R][C];
    gemv_rows<Type, R, C>(rows, K, x, to);
    for (int r = 0; r < R; ++r) {
      for (int c = 0; c < C; ++c) {
        y[c * y_stride + at[r]] = to[r][c];
      }
    }
  };
  for (int64_t i = 0; i < each; ++i) {
    run(i, each);
  }
  if (each * R < n) {
    run(each * R, 1);
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
  for (int64_t m = 0; m < M;) {
    auto row = [&](int64_t i) { return FixedRow(x[m + i], K); };
    float* to = y + m * y_stride;
    int64_t left = M - m;
    if (left >= 4) {
      const FixedRow rows[] = {row(0), row(1), row(2), row(3)};
      gemv_columns<Type, 2, 4>(w, row_bytes, n, K, rows, to, y_stride);
      m += 4;
    } else if (left >= 2) {
      const FixedRow rows[] = {row(0), row(1)};
      gemv_columns<Type, 2, 2>(w, row_bytes, n, K, rows, to, y_stride);
      m += 2;
    } else if (
        const FixedRow last = row(0);
        !in_planes<Type> || planes_of(last.way[0])) {
      gemv_columns<Type, 4, 1>(w, row_bytes, n, K, &last, to, y_stride);
      m += 1;
    } else { // in words, of which one row has no kernel of its own
      const FixedRow twice[] = {last, last};
      gemv_columns<Type, 2, 2>(w, row_bytes, n, K, twice, to, 0);
      m += 1;
    }
  }
}

template <typename Type>
struct Order {
  static constexpr Table<uint8_t, 16> table{
      [](int i) { return Codes<Type>::chunk(i / 4, i % 4); }};
};

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA
