// Products of many rows of x on tiles of AMX: 32 or 16 rows of w by 16 rows of
// x. Weights become bytes once and meet every row; those of scales that are
// whole, times their scale, in two digits where one is too small. All sums of
// bytes are exact.
#pragma once

#include "cpu/amx.h"
#include "cpu/amx_pack.h"
#include "cpu/fixed_scales.h"

namespace mlx_gguf::cpu::MLX_GGUF_ISA {
namespace {

// Rows of w that gemm keeps decoded at a time, and what it rounds them up to.
constexpr int gemm_tile_rows = 64, gemm_unit = 32;

// Whether bytes with a sign hold codes times whole scales.
template <typename Type>
constexpr bool has_short_products =
    Codes<Type>::byte_products && Codes<Type>::product_bias == 0;

// Bytes that a weight takes: its code, or both digits of its code times a whole
// scale, 256 * first + second, where a byte does not hold that.
template <typename Type>
constexpr int digits =
    Codes<Type>::has_whole && !has_short_products<Type> ? 2 : 1;

// Weights whose products are summed in whole numbers.
template <typename Type>
constexpr int run = Codes<Type>::has_whole ? 256 : 32;

// A super-block of 16 rows of w.
template <typename Type>
struct alignas(64) WeightTile {
  int8_t digits[2][16][256];
  float scales[16][16];
  float mins[16][16];
};

// 128 codes, as codes.h gives two times 64, as the weights follow each other:
// two runs of 64, of which the o-th is the at[o]-th of the super-block. So
// groups that are summed apart lie apart.
template <typename Type, int c>
struct Pairing {
  static constexpr int first = Codes<Type>::chunk(c, 0) / 4;
  static constexpr int other = [] {
    for (int i = 0; i < 8; ++i) {
      int at = Codes<Type>::chunk(c + i / 4, i % 4) / 4;
      if (at != first) {
        return at;
      }
    }
    return first;
  }();
  static constexpr int at[2] = {first, other};
  // Where 8 bytes of the o-th come from.
  template <int o>
  static constexpr Table<uint64_t, 8> from{[](int q) {
    for (int i = 0; i < 8; ++i) {
      if (Codes<Type>::chunk(c + i / 4, i % 4) == 4 * at[o] + q / 2) {
        return 2 * i + q % 2;
      }
    }
    return 0;
  }};
};

template <typename Type, int c>
inline void store_pair(Bytes a, Bytes b, int8_t* to) {
  using P = Pairing<Type, c>;
  auto store = [&](auto o) {
    Bytes all = _mm512_permutex2var_epi64(a, load64(P::template from<o>.at), b);
    _mm512_store_si512(to + 64 * P::at[o], all);
  };
  store(std::integral_constant<int, 0>{});
  store(std::integral_constant<int, 1>{});
}

// Words, those of even codes and of odd ones, as bytes: high digits, low ones.
struct Digits {
  Bytes high, low;
  explicit Digits(const Split& words) {
    constexpr int64_t low_bytes = 0x00ff00ff00ff00ff;
    Words mask = _mm512_set1_epi64(low_bytes);
    Words half = words_of(128);
    auto join = [&](Words even, Words odd) { // a ? b : c
      return _mm512_ternarylogic_epi64(mask, even, odd, 0xca);
    };
    low = join(words.even, shift_left<8>(words.odd));
    high = join(
        shift_right<8>(add_words(words.even, half)),
        add_words(words.odd, half));
  }
};

template <typename Type, int c>
inline Digits digits_of(const uint8_t* b, Bytes scales) {
  using T = Codes<Type>;
  auto [even, odd] = split<T::signed_codes>(T::template codes<c>(b));
  Words bias = words_of(-T::bias);
  using Of = ScaleOf<Type, c>;
  Words by = T::signed_scales || !T::whole_scales
                 ? shift_right_signed<8>(shuffle(scales, load64(Of::odd.at)))
                 : shuffle(scales, load64(Of::even.at));
  return Digits(
      {multiply_words(add_words(even, bias), by),
       multiply_words(add_words(odd, bias), by)});
}

template <typename Type, int c>
inline Bytes byte_of(const uint8_t* b, Bytes products) {
  using T = Codes<Type>;
  if constexpr (has_short_products<Type>) {
    return T::template scaled<c>(b, products);
  } else {
    return add_bytes(T::template codes<c>(b), bytes_of(-T::bias));
  }
}

template <typename Type>
inline void decode_row(const uint8_t* b, WeightTile<Type>& tile, int r) {
  using T = Codes<Type>;
  Bytes scales;
  if constexpr (has_short_products<Type>) {
    scales = T::products(b);
  } else if constexpr (T::has_whole) {
    scales = whole_scales<Type>(b);
  }
  four_times([&](auto c) {
    if constexpr (digits<Type> == 2) {
      Digits both = digits_of<Type, c>(b, scales);
      _mm512_store_si512(tile.digits[0][r] + 64 * c, both.high);
      _mm512_store_si512(tile.digits[1][r] + 64 * c, both.low);
    } else if constexpr (T::has_whole) {
      Bytes one = byte_of<Type, c>(b, scales);
      _mm512_store_si512(tile.digits[0][r] + 64 * c, one);
    } else if constexpr (c % 2 == 0) {
      store_pair<Type, c>(
          byte_of<Type, c>(b, scales),
          byte_of<Type, c + 1>(b, scales),
          tile.digits[0][r]);
    }
  });
  group_floats<Type>(b, tile.scales[r], tile.mins[r]);
}

// Sums of 16 by 16: of the first and the second tile of weights, each with both
// planes of x.
struct TileSums {
  alignas(64) int32_t at[4][16][16];
};

// A tile of rows of w or, of types with one digit, two, by 16 rows of x over
// run weights.
template <typename Type>
struct Unit {
  const PackedBlock* x;
  const WeightTile<Type>* tiles;
  float* y;
  int64_t part;
  bool low; // words of x
};

template <typename Type>
constexpr int unit_rows = 32 / digits<Type>;

// Rows that finish() takes at a time.
constexpr int finish_rows = 4;

// What tiles leave to vectors: y[r][m] += W[r] . x[m] for finish_rows rows from
// `first` on.
template <typename Type, bool mins>
inline __attribute__((always_inline)) void finish(
    const Unit<Type>& unit,
    const TileSums& sums,
    int64_t y_stride,
    int64_t first) {
  constexpr int64_t groups = run<Type> / Codes<Type>::group;
  const PackedBlock& x = *unit.x;
  const WeightTile<Type>& tile = unit.tiles[first / 16];
  int64_t row = first % 16;
  Floats by = load_floats(x.scales);
  if (unit.low) {
    by = multiply(by, floats_of(low_unit));
  }
  Floats x_sums[groups];
  for (int g = 0; mins && g < groups; ++g) {
    x_sums[g] = load_floats(x.sums[unit.part * groups + g]);
  }
  const int32_t (*of)[16][16] =
      sums.at + (digits<Type> == 2 ? 0 : first / 16 * 2);
  float* to = unit.y + first * y_stride;
  MLX_GGUF_UNROLL
  for (int r = 0; r < finish_rows; ++r) {
    auto ints = [&](int i) { return load64(of[i][row + r]); };
    Floats sum;
    if constexpr (digits<Type> == 2) {
      Ints middle = add_ints(ints(1), ints(2));
      sum = multiply_add(to_floats(middle), floats_of(256), to_floats(ints(3)));
      sum = multiply_add(to_floats(ints(0)), floats_of(65536), sum);
    } else {
      sum = to_floats(add_ints(shift_ints_left<8>(ints(0)), ints(1)));
    }
    Floats scale = floats_of(tile.scales[row + r][unit.part]);
    if constexpr (Codes<Type>::far_scales) {
      sum = multiply(sum, by);
    } else { // the sum times x's scale alone may be beyond f32
      scale = multiply(scale, by);
    }
    Floats total = multiply_add(sum, scale, load_floats(to));
    MLX_GGUF_UNROLL
    for (int g = 0; mins && g < groups; ++g) {
      Floats min = floats_of(tile.mins[row + r][unit.part * groups + g]);
      total = multiply_add(x_sums[g], min, total);
    }
    store_floats(to, total);
    to += y_stride;
  }
}

template <typename Type>
inline __attribute__((always_inline)) void finish_all(
    const Unit<Type>& unit,
    const TileSums& sums,
    int64_t y_stride,
    int64_t first,
    int64_t last) {
  for (int64_t r = first; r < last; r += finish_rows) {
    if (Codes<Type>::has_mins && !unit.low) {
      finish<Type, true>(unit, sums, y_stride, r);
    } else {
      finish<Type, false>(unit, sums, y_stride, r);
    }
  }
}

// Sums of a unit in tiles, while vectors finish the one before it.
template <typename Type>
inline void multiply_tiles(
    const Unit<Type>& unit,
    TileSums& out,
    const Unit<Type>& before,
    const TileSums& done,
    int64_t y_stride) {
  constexpr int64_t n = run<Type>, bytes = n < 64 ? n : 64, steps = n / bytes;
  constexpr int64_t rows = unit_rows<Type> / steps;
  const auto& tile = unit.tiles[0];
  const int8_t* first = tile.digits[0][0] + unit.part * n;
  const int8_t* second =
      unit.part * n +
      (digits<Type> == 2 ? tile.digits[1][0] : unit.tiles[1].digits[0][0]);
  const int8_t* x =
      (unit.low ? unit.x->low : unit.x->high).at[0][0][0] + unit.part * n * 16;
  finish_stores();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  MLX_GGUF_UNROLL
  for (int64_t s = 0; s < steps; ++s) {
    _tile_loadd(4, first + 64 * s, 256);
    _tile_loadd(6, x + 1024 * s, 64);
    _tile_loadd(7, x + 1024 * s + 4096, 64);
    _tile_loadd(5, second + 64 * s, 256);
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
    if (before.x) {
      finish_all<Type>(before, done, y_stride, rows * s, rows * (s + 1));
    }
  }
  _tile_stored(0, out.at[0], 64);
  _tile_stored(1, out.at[1], 64);
  _tile_stored(2, out.at[2], 64);
  _tile_stored(3, out.at[3], 64);
}

// Units one after the other.
template <typename Type>
class Pipeline {
 public:
  explicit Pipeline(int64_t y_stride) : y_stride_(y_stride) {}
  void add(const Unit<Type>& unit) {
    multiply_tiles<Type>(
        unit, sums_[turn_], before_, sums_[1 - turn_], y_stride_);
    before_ = unit;
    turn_ = 1 - turn_;
  }
  void end() {
    finish_all<Type>(before_, sums_[1 - turn_], y_stride_, 0, unit_rows<Type>);
    before_.x = nullptr;
  }

 private:
  TileSums sums_[2];
  Unit<Type> before_{};
  int64_t y_stride_;
  int turn_ = 0;
};

// y[r][m] = W[r] . x[m] for n rows of w and `vectors` times 16 rows of x; y has
// room for n rounded up to gemm_unit. x: for each vector, its PackedBlocks.
template <typename Type>
void gemm(
    const uint8_t* w,
    int64_t row_bytes,
    int64_t n,
    int64_t K,
    const void* const* x,
    int64_t vectors,
    float* y) {
  int64_t stride = 16 * vectors;
  int64_t rows = (n + gemm_unit - 1) / gemm_unit * gemm_unit;
  std::memset(y, 0, sizeof(float) * rows * stride);
  alignas(64) WeightTile<Type> tiles[gemm_tile_rows / 16];
  Pipeline<Type> pipeline(stride);
  Tiles shapes(run<Type> < 64 ? run<Type> : 64);
  for (int64_t b = 0; b < (K + 255) / 256; ++b) {
    for (int64_t r = 0; r < rows; ++r) {
      // Rows beyond the last are any: so are their products.
      const uint8_t* row = w + (r < n ? r : n - 1) * row_bytes;
      alignas(64) uint8_t padded[super_bytes<Type>];
      const uint8_t* from = b < K / 256 ? row + b * super_bytes<Type>
                                        : last_block<Type>(row, K, padded);
      decode_row<Type>(from, tiles[r / 16], r % 16);
    }
    for (int64_t v = 0; v < vectors; ++v) {
      const PackedBlock& block = static_cast<const PackedBlock*>(x[v])[b];
      for (int64_t r = 0; r < rows; r += unit_rows<Type>) {
        float* to = y + r * stride + 16 * v;
        for (int64_t part = 0; part < 256 / run<Type>; ++part) {
          for (int low = 0; low <= block.fine; ++low) {
            pipeline.add({&block, tiles + r / 16, to, part, low != 0});
          }
        }
      }
    }
    pipeline.end();
  }
}

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA
