// Sums of the lanes of several vectors of kernels_impl.h at once, for one
// instruction set.
#pragma once

#include "cpu/kernels_impl.h"

namespace mlx_gguf::cpu::MLX_GGUF_ISA {
namespace {

// Lanes of a folded onto themselves beside those of b: of each group of `width`
// lanes the lower half plus the upper one.
Vec fold_eights(Vec a, Vec b) {
  return __builtin_shufflevector(
             a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
         __builtin_shufflevector(
             a,
             b,
             8,
             9,
             10,
             11,
             12,
             13,
             14,
             15,
             24,
             25,
             26,
             27,
             28,
             29,
             30,
             31);
}

Vec fold_fours(Vec a, Vec b) {
  return __builtin_shufflevector(
             a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
         __builtin_shufflevector(
             a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}

Vec swap_twos(Vec a) {
  return __builtin_shufflevector(
      a, a, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
}

Vec swap_ones(Vec a) {
  return __builtin_shufflevector(
      a, a, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
}

// The sums of four vectors' lanes, by the tree of sum().
void four_sums(const Vec* a, float* out) {
  Vec v = fold_fours(fold_eights(a[0], a[1]), fold_eights(a[2], a[3]));
  v += swap_twos(v);
  v += swap_ones(v);
  float s[lanes];
  std::memcpy(s, &v, sizeof(s));
  for (int i = 0; i < 4; ++i) {
    out[i] = s[4 * i];
  }
}

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA
