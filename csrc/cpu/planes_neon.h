// Codes as signed bytes and x as two planes of them, for NEON with dot products
// of bytes: a word is 256 times the first byte and the second one. 64 first
// bytes lie before 64 second ones.
#pragma once

#include "cpu/words.h"

namespace mlx_gguf::cpu::MLX_GGUF_ISA {
namespace {

// So that both bytes have a sign: 127 * 256 + 127.
constexpr int largest_word = 32639;

// 16 words to the place-th quarter of 64.
inline void store_run(const int16_t* from, int16_t* to, int place) {
  auto first = reinterpret_cast<int8_t*>(to) + 16 * place;
  for (int i = 0; i < 16; ++i) {
    first[i] = static_cast<int8_t>((from[i] + 128) >> 8);
    first[64 + i] = static_cast<int8_t>(from[i]);
  }
}

// Of a block the p-th pair of words, in the order of words.h.
inline int32_t pair_at(const int16_t* block, int p) {
  auto first = reinterpret_cast<const int8_t*>(block) + p / 32 * 128;
  int at = p % 16 * 4 + p % 32 / 16;
  auto word = [&](int i) { return first[i] * 256 + first[64 + i]; };
  return (word(at) & 0xffff) |
         static_cast<int32_t>(uint32_t(word(at + 2)) << 16);
}

// All codes are below 128.
template <bool>
struct Operand {
  Bytes codes;
  explicit Operand(Bytes codes) : codes(codes) {}

  // Sums of the products of `runs` times 16 codes, from the i-th 16 on.
  template <int runs>
  int32x4_t products(int i, const int16_t* x) const {
    auto first = reinterpret_cast<const int8_t*>(x);
    int32x4_t sum = vdupq_n_s32(0);
    auto add = [&](const int8_t* plane) {
      for (int r = i; r < i + runs; ++r) {
        sum = vdotq_s32(sum, s8(codes.at[r]), vld1q_s8(plane + 16 * r));
      }
    };
    add(first);
    sum = vshlq_n_s32(sum, 8);
    add(first + 64);
    return sum;
  }
};

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA
