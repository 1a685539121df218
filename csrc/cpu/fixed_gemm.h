// Products of many rows of x, 16 to a vector: a tile of weights is turned into
// words once and meets every row. Whole numbers are summed exactly: over the
// weights that share a scale, or, where scales are whole and multiply the words
// themselves, over Codes::run times 16.
#pragma once

#include "cpu/fixed_pack.h"
#include "cpu/fixed_scales.h"

namespace mlx_gguf::cpu::MLX_GGUF_ISA {
namespace {

// Vectors of x and rows of w whose sums are in registers together.
#if defined(__AVX512BW__)
constexpr int gemm_vectors = 2, gemm_rows = 6;
#elif defined(__aarch64__)
constexpr int gemm_vectors = 1, gemm_rows = 6;
#else
constexpr int gemm_vectors = 1, gemm_rows = 2;
#endif

// Rows of w that gemm keeps decoded at a time, and what it rounds them up to.
constexpr int gemm_tile_rows = 48, gemm_unit = 6;

// A super-block of gemm_rows rows of w, biases taken off. Words times scales
// that are whole have one factor, the first of `scales`.
struct alignas(64) WeightTile {
  int16_t words[gemm_rows][256];
  float scales[gemm_rows][16];
  float mins[gemm_rows][16];
  float squares; // of such words whose products are summed together, at most
};

template <typename Type>
inline void decode_row(const uint8_t* b, WeightTile& tile, int r) {
  using T = Codes<Type>;
  Bytes scales;
  Ints squares[16 / T::run];
  for (Ints& sum : squares) {
    sum = no_ints();
  }
  if constexpr (T::has_whole) {
    scales = whole_scales<Type>(b);
  }
  four_times([&](auto c) {
    auto [even, odd] = split<T::signed_codes>(T::template codes<c>(b));
    Words bias = words_of(-T::bias);
    even = add_words(even, bias);
    odd = add_words(odd, bias);
    if constexpr (T::has_whole) {
      Words by = shift_right_signed<8>(
          shuffle(scales, load64(ScaleOf<Type, c>::odd.at)));
      even = multiply_words(even, by);
      odd = multiply_words(odd, by);
      Ints& sum = squares[4 * c / T::run];
      sum = add_squares(add_squares(sum, even), odd);
    }
    store_words(tile.words[r] + 64 * c, even);
    store_words(tile.words[r] + 64 * c + 32, odd);
  });
  group_floats<Type>(b, tile.scales[r], tile.mins[r]);
  if constexpr (T::has_whole) {
    for (const Ints& lanes : squares) {
      float sum = sum_lanes(fold(to_floats(lanes)));
      tile.squares = sum > tile.squares ? sum : tile.squares;
    }
  }
}

// Whether whole sums surely stay below 2^31: they are at most the root of the
// product of the sums of squares.
template <typename Type, int V>
bool in_range(const PackedBlock* const* x, const WeightTile& tile) {
  constexpr int level = Codes<Type>::run / 8;
  constexpr float most = 0x1p62f * 0.999f; // for roundings
  for (int v = 0; v < V; ++v) {
    if (!(x[v]->squares[level] * tile.squares < most)) {
      return false;
    }
  }
  return true;
}

// sums[v][r] += x words . w words over 16 * chunks weights.
template <int chunks, int V, int R>
inline __attribute__((always_inline)) void add_products(
    const int32_t (*const* x)[16],
    const WeightTile& tile,
    const uint16_t* starts,
    Ints (&sums)[V][R]) {
  for (int c = 0; c < chunks; ++c) {
    // The even words of 16 weights lie 32 words before the odd ones.
    for (int run = 0; run < 2; ++run) {
      int start = starts[c] + 32 * run;
      for (int p = 0; p < 4; ++p) {
        Pairs xs[V];
        for (int v = 0; v < V; ++v) {
          xs[v] = load_pairs(x[v][start / 2 + p]);
        }
        for (int r = 0; r < R; ++r) {
          PairInAll w = pair_in_all(tile.words[r] + start + 2 * p);
          for (int v = 0; v < V; ++v) {
            sums[v][r] = dot(sums[v][r], xs[v], w);
          }
        }
      }
    }
  }
}

// Sums of products, rounded to float.
template <int chunks, int V, int R>
inline __attribute__((always_inline)) void products(
    const int32_t (*const* x)[16],
    const WeightTile& tile,
    const uint16_t* starts,
    Floats (&out)[V][R]) {
  Ints sums[V][R];
  for (int i = 0; i < V * R; ++i) {
    sums[i / R][i % R] = no_ints();
  }
  add_products<chunks>(x, tile, starts, sums);
  for (int i = 0; i < V * R; ++i) {
    out[i / R][i % R] = to_floats(sums[i / R][i % R]);
  }
}

// The same where they may not fit 32 bits. Those of 16 weights do: 16 * 32767 *
// 4096.
template <int chunks, int V, int R>
__attribute__((noinline)) void long_products(
    const int32_t (*const* x)[16],
    const WeightTile& tile,
    const uint16_t* starts,
    Floats (&out)[V][R]) {
  int32_t high[V * R][16] = {}, low[V * R][16] = {};
  for (int c = 0; c < chunks; ++c) {
    Ints sums[V][R];
    for (int i = 0; i < V * R; ++i) {
      sums[i / R][i % R] = no_ints();
    }
    add_products<1>(x, tile, starts + c, sums);
    for (int i = 0; i < V * R; ++i) {
      int32_t sum[16];
      std::memcpy(sum, &sums[i / R][i % R], sizeof(sum));
      for (int j = 0; j < 16; ++j) {
        high[i][j] += sum[j] >> 16;
        low[i][j] += sum[j] & 0xffff;
      }
    }
  }
  for (int i = 0; i < V * R; ++i) {
    float all[16]; // rounded once, like sums in 32 bits
    for (int j = 0; j < 16; ++j) {
      all[j] = static_cast<float>(int64_t{high[i][j]} * 65536 + low[i][j]);
    }
    out[i / R][i % R] = load_floats(all);
  }
}

// y[r][v] += x . w over one super-block, for V vectors of 16 rows of x.
template <typename Type, int V>
void micro_kernel(
    const PackedBlock* const* x,
    const WeightTile& tile,
    float* y,
    int64_t y_stride) {
  using T = Codes<Type>;
  constexpr int R = gemm_rows, chunks = Codes<Type>::run;
  auto sum = products<chunks, V, R>;
  if constexpr (T::has_whole) {
    sum = in_range<Type, V>(x, tile) ? sum : long_products<chunks, V, R>;
  }
  // Where 16 weights lie among the words, those of a group together.
  static constexpr Table<uint16_t, 16> starts{[](int at) {
    for (int i = 0; i < 16; ++i) {
      if ((T::has_whole ? i : T::chunk(i / 4, i % 4)) == at) {
        return i / 4 * 64 + i % 4 * 8;
      }
    }
    return 0;
  }};
  Floats total[V][R];
  for (auto& row : total) {
    for (Floats& t : row) {
      t = floats_of(0);
    }
  }
  int32_t fine = 0;
  const int32_t (*high[V])[16];
  const int32_t (*low[V])[16];
  for (int v = 0; v < V; ++v) {
    high[v] = x[v]->high;
    low[v] = x[v]->fine ? x[v]->low : no_low;
    fine |= x[v]->fine;
  }
  for (int at = 0; at < 16; at += chunks) {
    auto add = [&](auto& words, float unit) {
      Floats sums[V][R];
      sum(words, tile, starts.at + at, sums);
      int g = T::has_whole ? 0 : at / chunks;
      for (int r = 0; r < R; ++r) {
        Floats scale = floats_of(tile.scales[r][g] * unit);
        for (int v = 0; v < V; ++v) {
          Floats s = sums[v][r];
          if constexpr (T::far_scales) {
            s = multiply(s, load_floats(x[v]->scales));
          }
          total[v][r] = multiply_add(s, scale, total[v][r]);
        }
      }
    };
    add(high, 1);
    if (fine) {
      add(low, low_unit);
    }
  }
  for (int g = 0; T::has_mins && g < 256 / T::group; ++g) {
    for (int r = 0; r < R; ++r) {
      Floats min = floats_of(tile.mins[r][g]);
      for (int v = 0; v < V; ++v) {
        Floats s = load_floats(x[v]->sums[g]);
        total[v][r] = multiply_add(s, min, total[v][r]);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) {
      float* to = y + r * y_stride + 16 * v;
      Floats scale = T::far_scales ? floats_of(1) : load_floats(x[v]->scales);
      store_floats(to, multiply_add(total[v][r], scale, load_floats(to)));
    }
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
  int64_t stride = 16 * vectors;
  int64_t tiles = (n + gemm_rows - 1) / gemm_rows;
  std::memset(y, 0, sizeof(float) * tiles * gemm_rows * stride);
  alignas(64) WeightTile tile[gemm_tile_rows / gemm_rows];
  for (int64_t b = 0; b < (K + 255) / 256; ++b) {
    for (int64_t r = 0; r < tiles * gemm_rows; ++r) {
      WeightTile& to = tile[r / gemm_rows];
      if (r % gemm_rows == 0) {
        to.squares = 0;
      }
      if (r < n) {
        const uint8_t* row = w + r * row_bytes;
        alignas(64) uint8_t padded[super_bytes<Type>];
        const uint8_t* from = b < K / 256 ? row + b * super_bytes<Type>
                                          : last_block<Type>(row, K, padded);
        decode_row<Type>(from, to, r % gemm_rows);
      } else if (b == 0) {
        std::memset(to.words[r % gemm_rows], 0, sizeof(to.words[0]));
        std::memset(to.scales[r % gemm_rows], 0, sizeof(to.scales[0]));
        std::memset(to.mins[r % gemm_rows], 0, sizeof(to.mins[0]));
      }
    }
    auto block = [&](int64_t v) {
      return static_cast<const PackedBlock*>(x[v]) + b;
    };
    for (int64_t v = 0; v < vectors;) {
      bool several = v + gemm_vectors <= vectors;
      const PackedBlock* blocks[gemm_vectors] = {block(v)};
      for (int i = 1; several && i < gemm_vectors; ++i) {
        blocks[i] = block(v + i);
      }
      auto run =
          several ? micro_kernel<Type, gemm_vectors> : micro_kernel<Type, 1>;
      for (int64_t t = 0; t < tiles; ++t) {
        run(blocks, tile[t], y + t * gemm_rows * stride + 16 * v, stride);
      }
      v += several ? gemm_vectors : 1;
    }
  }
}

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA
