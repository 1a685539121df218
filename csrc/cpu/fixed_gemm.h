// Products of many rows of x, 16 to a vector: a tile of weights is turned into
// words once and meets every row. Whole numbers are summed exactly: over the
// weights that share a scale, or, where scales are whole and multiply the words
// themselves, over as many as 32 bits hold.
#pragma once

#include "cpu/fixed_gemv.h"

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

// A block of 256 values of 16 rows of x: pairs of words by row.
struct alignas(64) PackedBlock {
  int32_t high[128][16];
  int32_t low[128][16];
  float sums[16][16]; // over a group, in units of the scale
  float scales[16];
  int32_t fine; // low is in use
  // At most, of any row's words, of `2 << i` times 16 that are neighbours.
  float squares[3];
};

// The low words of a block that has none, beside one that has.
alignas(64) const int32_t no_low[128][16] = {};

// A super-block of gemm_rows rows of w, biases taken off. Words times scales
// that are whole have one factor, the first of `scales`.
struct alignas(64) WeightTile {
  int16_t words[gemm_rows][256];
  float scales[gemm_rows][16];
  float mins[gemm_rows][16];
  float squares; // of any row's first or last 128 such words, at most
};

int64_t packed_bytes(int64_t K) {
  return (K + 255) / 256 * static_cast<int64_t>(sizeof(PackedBlock));
}

// Raises squares[i] to the sum of squares of any `2 << i` times 16 words of a
// block.
void raise(float (&squares)[3], const int16_t* words) {
  uint32_t sums[16];
  for (int i = 0; i < 16; ++i) {
    const int16_t* even = words + i / 4 * 64 + i % 4 * 8;
    uint32_t sum = 0;
    for (int j = 0; j < 8; ++j) {
      int32_t a = even[j], b = even[32 + j];
      sum += static_cast<uint32_t>(a * a) / 32 + 1;
      sum += static_cast<uint32_t>(b * b) / 32 + 1;
    }
    sums[i] = sum;
  }
  for (int level = 0, n = 8; level < 3; ++level, n /= 2) {
    for (int i = 0; i < n; ++i) {
      sums[i] = sums[2 * i] + sums[2 * i + 1];
      float most = 32.0f * static_cast<float>(sums[i]);
      squares[level] = most > squares[level] ? most : squares[level];
    }
  }
}

// Rows of x, at most 16, nullptr for none, as PackedBlocks.
void pack(const void* const* rows, int64_t K, bool groups_of_32, void* out) {
  auto blocks = static_cast<PackedBlock*>(out);
  for (int64_t b = 0; b < (K + 255) / 256; ++b) {
    blocks[b].fine = 0;
    std::memset(blocks[b].squares, 0, sizeof(blocks[b].squares));
  }
  for (int r = 0; r < 16; ++r) {
    for (int64_t b = 0; b < (K + 255) / 256; ++b) {
      PackedBlock& to = blocks[b];
      if (!rows[r]) {
        for (int p = 0; p < 128; ++p) {
          to.high[p][r] = to.low[p][r] = 0;
        }
        for (auto& sums : to.sums) {
          sums[r] = 0;
        }
        to.scales[r] = 0;
        continue;
      }
      FixedRow x(rows[r], K);
      auto pair = [&](const int16_t* words, int p) {
        return pair_at(words + 256 * b, p);
      };
      for (int p = 0; p < 128; ++p) {
        to.high[p][r] = pair(x.high, p);
      }
      raise(to.squares, x.high + 256 * b);
      if (is_fine(x.way[b]) && !to.fine) {
        to.fine = 1;
        std::memset(to.low, 0, sizeof(to.low));
      }
      if (to.fine) {
        raise(to.squares, x.low + 256 * b);
      }
      for (int p = 0; to.fine && p < 128; ++p) {
        to.low[p][r] = pair(x.low, p);
      }
      float up = 1.0f / x.scales[b];
      for (int g = 0; g < (groups_of_32 ? 8 : 16); ++g) {
        const float* sums = groups_of_32 ? x.sums32 + 8 * b : x.sums16 + 16 * b;
        to.sums[g][r] = sums[g] * up;
      }
      to.scales[r] = x.scales[b];
    }
  }
}

// Scales of a super-block as floats: one for every group, or the factor of
// whole ones. And mins, one for every group.
template <typename Type>
inline void group_floats(const uint8_t* b, float* scales, float* mins) {
  using T = Codes<Type>;
  if constexpr (T::has_whole) {
    constexpr int at = T::factors_at + 2 * T::d_place;
    store_eight(scales, eight_of_half(read<uint16_t>(b + at)));
  } else {
    store_eight(scales, T::scales(b));
  }
  if constexpr (T::has_mins && T::whole_scales) {
    Floats m = floats_of_bytes(T::mins(b));
    float factor = offset_factor<Type> * Factors<Type, 1>(&b).of_offsets(0);
    store_floats(mins, multiply(m, floats_of(factor)));
  } else if constexpr (T::has_mins) {
    store_eight(mins, T::mins(b));
  }
}

template <typename Type>
inline Bytes whole_scales(const uint8_t* b) {
  if constexpr (Codes<Type>::whole_scales) {
    return Codes<Type>::scales(b);
  } else {
    return Codes<Type>::whole(b);
  }
}

template <typename Type>
inline void decode_row(const uint8_t* b, WeightTile& tile, int r) {
  using T = Codes<Type>;
  Bytes scales;
  Ints squares[2] = {no_ints(), no_ints()};
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
      Ints& sum = squares[c / 2];
      sum = add_squares(add_squares(sum, even), odd);
    }
    store_words(tile.words[r] + 64 * c, even);
    store_words(tile.words[r] + 64 * c + 32, odd);
  });
  group_floats<Type>(b, tile.scales[r], tile.mins[r]);
  if constexpr (T::has_whole) {
    for (Ints half : squares) {
      float sum = sum_lanes(fold(to_floats(half)));
      tile.squares = sum > tile.squares ? sum : tile.squares;
    }
  }
}

// Of 1, 2, 4, 8 and 16 times 16 words the most whose products with x surely add
// up to less than 2^31: sums of products are at most the root of the product of
// the sums of squares. Those of 16 are: 16 * 32767 * 4096.
template <int V>
int chunks_in_range(const PackedBlock* const* x, const WeightTile& tile) {
  constexpr float most = 0x1p62f * 0.999f; // for roundings
  float squares[3] = {};
  for (int i = 0; i < 3; ++i) {
    for (int v = 0; v < V; ++v) {
      float s = x[v]->squares[i] * tile.squares;
      squares[i] = s > squares[i] ? s : squares[i];
    }
  }
  if (4 * squares[2] < most) { // two halves
    return 16;
  }
  int chunks = 8;
  for (int i = 2; i >= 0 && squares[i] >= most; --i) {
    chunks /= 2;
  }
  return chunks;
}

// sums[v][r] += x words . w words over 16 * chunks weights.
template <int V, int R>
inline __attribute__((always_inline)) void group_products(
    const int32_t (*const* x)[16],
    const WeightTile& tile,
    const uint16_t* starts,
    int chunks,
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

// y[r][v] += x . w over one super-block, for V vectors of 16 rows of x.
template <typename Type, int V>
void micro_kernel(
    const PackedBlock* const* x,
    const WeightTile& tile,
    float* y,
    int64_t y_stride) {
  using T = Codes<Type>;
  constexpr int R = gemm_rows;
  int chunks = T::group / 16; // whose products meet a scale together
  if constexpr (T::has_whole) {
    chunks = chunks_in_range<V>(x, tile);
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
    auto add_products = [&](auto& words, float unit) {
      Ints sums[V][R];
      for (auto& row : sums) {
        for (Ints& s : row) {
          s = no_ints();
        }
      }
      group_products(words, tile, starts.at + at, chunks, sums);
      int g = T::has_whole ? 0 : at / chunks;
      for (int r = 0; r < R; ++r) {
        Floats scale = floats_of(tile.scales[r][g] * unit);
        for (int v = 0; v < V; ++v) {
          Floats s = to_floats(sums[v][r]);
          if constexpr (T::far_scales) {
            s = multiply(s, load_floats(x[v]->scales));
          }
          total[v][r] = multiply_add(s, scale, total[v][r]);
        }
      }
    };
    add_products(high, 1);
    if (fine) {
      add_products(low, low_unit);
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
// room for n rounded up to gemm_rows. x: for each vector, its PackedBlocks.
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
