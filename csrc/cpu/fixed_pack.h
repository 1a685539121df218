// 16 rows of x in fixed point side by side, as gemm reads them.
#pragma once

#include "cpu/fixed.h"

namespace mlx_gguf::cpu::MLX_GGUF_ISA {
namespace {

// A block of 256 values of 16 rows of x: pairs of words by row.
struct alignas(64) PackedBlock {
  int32_t high[128][16];
  int32_t low[128][16];
  float sums[16][16]; // over a group, in units of the scale
  float scales[16];
  int32_t fine;     // low is in use
  float squares[3]; // of any row's `4 << i` times 16 words, at most
};

// The low words of a block that has none, beside one that has.
alignas(64) const int32_t no_low[128][16] = {};

int64_t packed_bytes(int64_t K) {
  return (K + 255) / 256 * static_cast<int64_t>(sizeof(PackedBlock));
}

// Raises squares[i] to the sum of squares of any `4 << i` times 16 words of a
// block.
void raise(float (&squares)[3], const int16_t* words) {
  uint32_t sums[16];
  for (int i = 0; i < 16; ++i) {
    const int16_t* even = words + i / 4 * 64 + i % 4 * 8;
    uint32_t sum = 0;
    for (int j = 0; j < 8; ++j) {
      int32_t a = even[j], b = even[32 + j];
      sum += static_cast<uint32_t>(a * a) / 128 + 1;
      sum += static_cast<uint32_t>(b * b) / 128 + 1;
    }
    sums[i] = sum;
  }
  for (int level = -1, n = 8; level < 3; ++level, n /= 2) {
    for (int i = 0; i < n; ++i) {
      sums[i] = sums[2 * i] + sums[2 * i + 1];
      float most = 128.0f * static_cast<float>(sums[i]);
      if (level >= 0 && most > squares[level]) {
        squares[level] = most;
      }
    }
  }
}

// Rows of x, at most 16, nullptr for none, as PackedBlocks.
void pack(
    const void* const* rows, int64_t K, const TypeKernels& type, void* out) {
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
      for (int g = 0; g < (type.groups_of_32 ? 8 : 16); ++g) {
        const float* sums =
            type.groups_of_32 ? x.sums32 + 8 * b : x.sums16 + 16 * b;
        to.sums[g][r] = sums[g] * up;
      }
      to.scales[r] = x.scales[b];
    }
  }
}

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA
