// Codes as words of 16 bits and x likewise: those of 64 codes at even places,
// then those at odd ones.
#pragma once

#include "cpu/simd.h"

namespace mlx_gguf::cpu::MLX_GGUF_ISA {
namespace {

struct Split {
  Words even, odd;
};

template <bool is_signed>
Split split(Bytes codes) {
  if constexpr (is_signed) {
    return {
        shift_right_signed<8>(shift_left<8>(codes)),
        shift_right_signed<8>(codes)};
  } else {
    return {bit_and(codes, words_of(255)), shift_right<8>(codes)};
  }
}

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA
