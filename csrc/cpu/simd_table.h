// What the vectors of all instruction sets have in common.
#pragma once

#include "cpu/decode.h"

// Before loops whose sums are to stay in registers.
#ifdef __clang__
#define MLX_GGUF_UNROLL _Pragma("unroll")
#else
#define MLX_GGUF_UNROLL _Pragma("GCC unroll 16")
#endif

namespace mlx_gguf::cpu::MLX_GGUF_ISA {
namespace {

inline int32_t two_words(const int16_t* p) {
  int32_t words;
  std::memcpy(&words, p, sizeof(words));
  return words;
}

// Constants of a vector, from a function of the place.
template <typename T, int n>
struct alignas(64) Table {
  T at[n];
  template <typename F>
  constexpr explicit Table(F f) : at{} {
    for (int i = 0; i < n; ++i) {
      at[i] = static_cast<T>(f(i));
    }
  }
};

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA
