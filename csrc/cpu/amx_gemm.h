// Products of many rows of x on tiles of AMX: 32 or 16 rows of w by 16 rows of
// x. Weights become bytes once and meet every row; those of scales that are
// whole, times their scale, two digits each. All sums of bytes are exact.
#pragma once

#include "cpu/amx.h"
#include "cpu/amx_pack.h"
#include "cpu/fixed_scales.h"

namespace mlx_gguf::cpu::MLX_GGUF_ISA {
namespace {

// Rows of w that gemm keeps decoded at a time, and what it rounds them up to.
constexpr int gemm_tile_rows = 64, gemm_unit = 32;

// Bytes that a weight takes: its code, or both digits of its code times a whole
// scale, 256 * first + second, where a byte does not hold that.
template <typename Type>
constexpr int digits =
    Codes<Type>::has_whole && !Codes<Type>::byte_products ? 2 : 1;

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

// 128 codes, as codes.h gives two times 64, in the order of the weights: two
// runs of 64, of which the o-th is the at[o]-th of the super-block.
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
  Words by =
      shift_right_signed<8>(shuffle(scales, load64(ScaleOf<Type, c>::odd.at)));
  return Digits(
      {multiply_words(add_words(even, bias), by),
       multiply_words(add_words(odd, bias), by)});
}

template <typename Type, int c>
inline Bytes byte_of(const uint8_t* b, Bytes products) {
  using T = Codes<Type>;
  if constexpr (T::byte_products) {
    return T::template scaled<c>(b, products);
  } else {
    return add_bytes(T::template codes<c>(b), bytes_of(-T::bias));
  }
}

template <typename Type>
inline void decode_row(const uint8_t* b, WeightTile<Type>& tile, int r) {
  using T = Codes<Type>;
  Bytes scales;
  if constexpr (T::byte_products) {
    scales = T::products(b);
  } else if constexpr (T::has_whole) {
    scales = whole_scales<Type>(b);
  }
  four_times([&](auto c) {
    if constexpr (c % 2 == 0 && digits<Type> == 2) {
      Digits first = digits_of<Type, c>(b, scales);
      Digits second = digits_of<Type, c + 1>(b, scales);
      store_pair<Type, c>(first.high, second.high, tile.digits[0][r]);
      store_pair<Type, c>(first.low, second.low, tile.digits[1][r]);
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
  alignas(64) int32_t at[2][2][16][16];
};

// The sums over n weights of two tiles of w, `bytes` of a row at a time.
template <int bytes>
inline void multiply_tiles(
    const int8_t (*first)[256],
    const int8_t (*second)[256],
    const Planes& x,
    int at,
    int n,
    TileSums& out) {
  finish_stores();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int k = at; k < at + n; k += bytes) {
    _tile_loadd(4, first[0] + k, 256);
    _tile_loadd(6, x.at[0][k / 4], 64);
    _tile_loadd(7, x.at[1][k / 4], 64);
    _tile_loadd(5, second[0] + k, 256);
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
  _tile_stored(0, out.at[0][0], 64);
  _tile_stored(1, out.at[0][1], 64);
  _tile_stored(2, out.at[1][0], 64);
  _tile_stored(3, out.at[1][1], 64);
}

// y[r][m] += W[r] . x[m] over a super-block for the rows of `tiles`, one of
// them or, of types with one digit, two.
template <typename Type>
inline void micro_kernel(
    const PackedBlock& x,
    const WeightTile<Type>* tiles,
    float* y,
    int64_t y_stride) {
  using T = Codes<Type>;
  constexpr int D = digits<Type>, n = run<Type>, parts = 256 / n;
  constexpr int bytes = n < 64 ? n : 64;
  Floats x_scale = load_floats(x.scales);
  TileSums sums;
  auto add = [&](const Planes& planes, int part, float unit) {
    multiply_tiles<bytes>(
        tiles[0].digits[0],
        D == 2 ? tiles[0].digits[1] : tiles[1].digits[0],
        planes,
        part * n,
        n,
        sums);
    Floats by = multiply(x_scale, floats_of(unit));
    for (int r = 0; r < 32 / D; ++r) {
      auto ints = [&](int i, int p) { return load64(sums.at[i][p][r % 16]); };
      Floats sum;
      if constexpr (D == 2) {
        Ints middle = add_ints(ints(0, 1), ints(1, 0));
        sum = multiply_add(
            to_floats(middle), floats_of(256), to_floats(ints(1, 1)));
        sum = multiply_add(to_floats(ints(0, 0)), floats_of(65536), sum);
      } else {
        int i = r / 16;
        sum = to_floats(add_ints(shift_ints_left<8>(ints(i, 0)), ints(i, 1)));
      }
      float* to = y + r * y_stride;
      Floats scale = floats_of(tiles[r / 16].scales[r % 16][part]);
      store_floats(to, multiply_add(multiply(sum, by), scale, load_floats(to)));
    }
  };
  for (int part = 0; part < parts; ++part) {
    add(x.high, part, 1);
    if (x.fine) {
      add(x.low, part, low_unit);
    }
  }
  for (int r = 0; T::has_mins && r < 32 / D; ++r) {
    float* to = y + r * y_stride;
    Floats total = load_floats(to);
    for (int g = 0; g < 256 / T::group; ++g) {
      Floats min = floats_of(tiles[r / 16].mins[r % 16][g]);
      total = multiply_add(load_floats(x.sums[g]), min, total);
    }
    store_floats(to, total);
  }
}

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
  constexpr int64_t together = 32 / digits<Type>; // rows of a micro_kernel
  int64_t stride = 16 * vectors;
  int64_t rows = (n + gemm_unit - 1) / gemm_unit * gemm_unit;
  std::memset(y, 0, sizeof(float) * rows * stride);
  alignas(64) WeightTile<Type> tiles[gemm_tile_rows / 16];
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
      for (int64_t r = 0; r < rows; r += together) {
        micro_kernel<Type>(
            block, tiles + r / 16, y + r * stride + 16 * v, stride);
      }
    }
  }
}

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA
