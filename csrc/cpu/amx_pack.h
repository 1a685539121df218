// 16 rows of x in planes of bytes side by side, as tiles read them.
#pragma once

#include "cpu/fixed.h"

namespace mlx_gguf::cpu::MLX_GGUF_ISA {
namespace {

// Words in two planes, 256 * first + second: 4 values of a row, then those of
// the next.
struct alignas(64) Planes {
  int8_t at[2][64][16][4];
};

// A block of 256 values of 16 rows of x, in the order of the weights.
struct alignas(64) PackedBlock {
  Planes high;
  Planes low;
  float sums[16][16]; // over a group
  float scales[16];
  int32_t fine; // low is in use
};

int64_t packed_bytes(int64_t K) {
  return (K + 255) / 256 * static_cast<int64_t>(sizeof(PackedBlock));
}

// A block of a row in the order of the weights: from words or planes in that of
// a type.
struct Natural {
  alignas(64) int16_t words[256];
  Natural(const int16_t* block, Way way, const uint8_t* order, bool low) {
    auto bytes = reinterpret_cast<const int8_t*>(block);
    for (int i = 0; i < 16; ++i) {
      int16_t* to = words + 16 * order[i];
      if (!planes_of(way)) {
        const int16_t* even = block + i / 4 * 64 + i % 4 * 8;
        for (int j = 0; j < 16; ++j) {
          to[j] = even[j / 2 + j % 2 * 32];
        }
        continue;
      }
      // The one low plane of three counts 128 times.
      bool one = low && way == Way::planes3;
      int first = one ? 0 : 256, second = one ? 128 : 1;
      for (int j = 0; j < 16; ++j) {
        int at = 16 * i + j;
        to[j] =
            static_cast<int16_t>(first * bytes[at] + second * bytes[256 + at]);
      }
    }
  }
};

inline void lay(const Natural& x, int r, Planes& to) {
  alignas(64) int8_t bytes[2][256];
  for (int i = 0; i < 256; ++i) {
    auto low = static_cast<int8_t>(x.words[i]);
    bytes[0][i] = static_cast<int8_t>((x.words[i] - low) >> 8);
    bytes[1][i] = low;
  }
  for (int p = 0; p < 2; ++p) {
    for (int k = 0; k < 64; ++k) {
      std::memcpy(to.at[p][k][r], bytes[p] + 4 * k, 4);
    }
  }
}

// Rows of x, at most 16, nullptr for none, as PackedBlocks.
void pack(
    const void* const* rows, int64_t K, const TypeKernels& type, void* out) {
  auto blocks = static_cast<PackedBlock*>(out);
  for (int64_t b = 0; b < (K + 255) / 256; ++b) {
    PackedBlock& to = blocks[b];
    bool all = true, fine = false;
    for (int r = 0; r < 16; ++r) {
      all = all && rows[r];
      fine = fine || (rows[r] && is_fine(FixedRow(rows[r], K).way[b]));
    }
    if (!all || fine) {
      std::memset(&to, 0, sizeof(to));
    }
    to.fine = fine;
    for (int r = 0; r < 16; ++r) {
      if (!rows[r]) {
        continue;
      }
      FixedRow x(rows[r], K);
      Way way = x.way[b];
      lay(Natural(x.high + 256 * b, way, type.order, false), r, to.high);
      if (is_fine(way)) {
        lay(Natural(x.low + 256 * b, way, type.order, true), r, to.low);
      }
      for (int g = 0; g < (type.groups_of_32 ? 8 : 16); ++g) {
        to.sums[g][r] =
            type.groups_of_32 ? x.sums32[8 * b + g] : x.sums16[16 * b + g];
      }
      to.scales[r] = x.scales[b];
    }
  }
}

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA
