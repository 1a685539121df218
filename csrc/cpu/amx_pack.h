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

// A block of 256 values of 16 rows of x, in the order of gemm.
struct alignas(64) PackedBlock {
  Planes high;
  Planes low;
  float sums[16][16]; // over a group
  float scales[16];
  int32_t fine; // low is in use, zeros in rows that need none
};

int64_t packed_bytes(int64_t K) {
  return (K + 255) / 256 * static_cast<int64_t>(sizeof(PackedBlock));
}

// A block of a row's words, those of even codes before those of odd ones, as
// planes.
inline void lay(
    const int16_t* block, const TypeKernels& type, int r, Planes& to) {
  alignas(64) int16_t words[256];
  for (int i = 0; i < 16; ++i) {
    const int16_t* even = block + i / 4 * 64 + i % 4 * 8;
    Quarter a = load16(even), b = load16(even + 32);
    int at = type.tiles_in_order ? i : type.order[i];
    auto to_words = reinterpret_cast<__m128i*>(words + 16 * at);
    _mm_store_si128(to_words, _mm_unpacklo_epi16(a, b));
    _mm_store_si128(to_words + 1, _mm_unpackhi_epi16(a, b));
  }
  alignas(64) int8_t bytes[2][256];
  for (int i = 0; i < 256; i += 16) {
    store_bytes(words + i, bytes[0] + i);
  }
  for (int p = 0; p < 2; ++p) {
    for (int k = 0; k < 64; ++k) {
      std::memcpy(to.at[p][k][r], bytes[p] + 4 * k, 4);
    }
  }
}

// Rows of x in words, at most 16, nullptr for none, as PackedBlocks.
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
    if (!all) {
      std::memset(&to, 0, sizeof(to));
    }
    to.fine = fine;
    for (int r = 0; r < 16; ++r) {
      if (!rows[r]) {
        continue;
      }
      FixedRow x(rows[r], K);
      lay(x.high + 256 * b, type, r, to.high);
      if (to.fine) {
        lay(x.low + 256 * b, type, r, to.low);
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
