// x in fixed point as words.
#pragma once

#include "cpu/words.h"

namespace mlx_gguf::cpu::MLX_GGUF_ISA {
namespace {

// Of x in fixed point. Two bytes with a sign hold 127 * 256 + 127.
constexpr int largest_word = has_planes ? 32639 : 32767;

// 16 words to the place-th quarter of 64.
inline void store_run(const int16_t* from, int16_t* to, int place) {
  split_words(from, to + 8 * place, to + 8 * place + 32);
}

// Of a block the p-th pair of words, in the order of words.h.
inline int32_t pair_at(const int16_t* block, int p) {
  return two_words(block + 2 * p);
}

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA
