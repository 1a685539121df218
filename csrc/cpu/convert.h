// 16-bit floats and back, rounding to nearest even, without library calls: a
// file built for one instruction set must not define inline functions that the
// rest of the extension could be linked against.
#pragma once

#include <cstdint>
#include <cstring>

namespace mlx_gguf::cpu::MLX_GGUF_ISA {
namespace {

inline float bits_to_float(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

inline uint32_t float_to_bits(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return bits;
}

inline float half_to_float(uint16_t h) {
  uint32_t sign = (h & 0x8000u) << 16;
  uint32_t rest = (h & 0x7fffu) << 13;
  uint32_t exponent = rest & 0x0f800000u;
  uint32_t normal = rest + (112u << 23);
  uint32_t special = rest + (224u << 23); // infinity and NaN
  // A subnormal becomes the fraction of 2^-14, less the implicit one.
  uint32_t subnormal = float_to_bits(
      bits_to_float(rest + (113u << 23)) - bits_to_float(113u << 23));
  uint32_t bits = exponent == 0             ? subnormal
                  : exponent == 0x0f800000u ? special
                                            : normal;
  return bits_to_float(bits | sign);
}

inline float bfloat_to_float(uint16_t h) {
  return bits_to_float(uint32_t(h) << 16);
}

// 2^(e - 128): half of an E8M0 scale, for tables that hold doubled values.
inline float e8m0_half_to_float(uint8_t e) {
  return bits_to_float(e < 2 ? 0x00200000u << e : uint32_t(e - 1) << 23);
}

inline uint16_t float_to_half(float f) {
  uint32_t bits = float_to_bits(f);
  uint32_t sign = bits >> 16 & 0x8000u;
  uint32_t abs = bits & 0x7fffffffu;
  // Below 2^-14: adding 0.5 leaves multiples of 2^-24 in the low bits.
  uint32_t small = float_to_bits(bits_to_float(abs) + 0.5f) - 0x3f000000u;
  uint32_t normal = (abs + 0xfffu + (abs >> 13 & 1) - (112u << 23)) >> 13;
  normal = normal > 0x7c00u ? 0x7c00u : normal;
  uint32_t special = 0x7c00u | (abs > 0x7f800000u ? 0x200u : 0u);
  uint32_t half = abs >= 0x7f800000u  ? special
                  : abs < 0x38800000u ? small
                                      : normal;
  return static_cast<uint16_t>(half | sign);
}

inline uint16_t float_to_bfloat(float f) {
  uint32_t bits = float_to_bits(f);
  uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
  uint32_t nan = bits >> 16 | 0x40u;
  return static_cast<uint16_t>(
      (bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA
