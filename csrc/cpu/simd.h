// Vectors of 64 bytes, over which the kernels are written once: Bytes, Words of
// 16 bits, Ints and Floats of 32, all loaded and stored whole; their parts are
// Quarter, Half and HalfFloats.
#pragma once

#if defined(__AVX512BW__)
#include "cpu/simd_avx512.h"
#elif defined(__AVX2__)
#include "cpu/simd_avx2.h"
#else
#include "cpu/simd_neon.h"
#endif

namespace mlx_gguf::cpu::MLX_GGUF_ISA {
namespace {

// Whether a row of x that meets its weights alone lies in planes of bytes, for
// products of bytes that sum four.
#ifdef __AVX512VNNI__
constexpr bool has_planes = true;
#else
constexpr bool has_planes = false;
#endif

// 32 that hold 64 bytes each.
#ifdef __AVX512F__
constexpr bool many_registers = true;
#else
constexpr bool many_registers = false;
#endif

inline HalfFloats fold(Floats a) {
  return add(first_half(a), second_half(a));
}

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA
