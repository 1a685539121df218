// Blocks of 32 weights, eight to the super-block: see codes.h.
#pragma once

#include "cpu/codes.h"

namespace mlx_gguf::cpu::MLX_GGUF_ISA {
namespace {

// f16 numbers of eight blocks.
template <typename Type, int at>
inline __attribute__((always_inline)) HalfFloats
eight_halves(const uint8_t* b) {
  auto h = [&](int i) {
    uint64_t v = read<uint16_t>(b + i * Type::bytes + at);
    // Or compilers gather them in vectors, whose ports are what is short.
    asm("" : "+r"(v));
    return v;
  };
  auto four = [&](int i) {
    return h(i) | h(i + 1) << 16 | h(i + 2) << 32 | h(i + 3) << 48;
  };
  return floats_of_halves(quarter_of(four(0), four(4)));
}

// Nibbles of four blocks: their first 16 weights (even c) or last 16.
template <typename Type, int at>
struct NibbleBlocks : CodesDefaults {
  static constexpr int shared = 2;
  static constexpr int chunk(int c, int i) {
    return c / 2 * 8 + 2 * i + c % 2;
  }
  template <int c>
  static Bytes codes(const uint8_t* b) {
    const uint8_t* q = b + c / 2 * 4 * Type::bytes + at;
    auto two = [](const uint8_t* p) {
      return half_of(load16(p), load16(p + Type::bytes));
    };
    Bytes four = two_halves(two(q), two(q + 2 * Type::bytes));
    return c % 2 ? high_nibbles(four) : low_nibbles(four);
  }
  static HalfFloats scales(const uint8_t* b) {
    return eight_halves<Type, 0>(b);
  }
  static HalfFloats mins(const uint8_t* b) {
    return eight_halves<Type, 2>(b);
  }
};

// The same with a fifth bit from 32 more at `bits`.
template <typename Type, int at, int bits>
struct FiveBitBlocks : NibbleBlocks<Type, at> {
  template <int c>
  static Bytes codes(const uint8_t* b) {
    const uint8_t* p = b + c / 2 * 4 * Type::bytes + bits + c % 2 * 2;
    auto h = [&](int i) -> uint64_t {
      return read<uint16_t>(p + i * Type::bytes);
    };
    uint64_t set = h(0) | h(1) << 16 | h(2) << 32 | h(3) << 48;
    return add_where(NibbleBlocks<Type, at>::template codes<c>(b), set, 16);
  }
};

template <typename Type, int at, typename Values>
struct TableBlocks : NibbleBlocks<Type, at> {
  static constexpr bool signed_codes = Values::signed_codes;
  static constexpr int bias = Values::bias;
  template <int c>
  static Bytes codes(const uint8_t* b) {
    return Values::look_up(NibbleBlocks<Type, at>::template codes<c>(b));
  }
};

template <>
struct Codes<Q4_0> : NibbleBlocks<Q4_0, 2> {
  static constexpr int bias = 8;
};

template <>
struct Codes<Q4_1> : NibbleBlocks<Q4_1, 4> {
  static constexpr bool has_mins = true;
};

template <>
struct Codes<Q5_0> : FiveBitBlocks<Q5_0, 6, 2> {
  static constexpr int bias = 16;
};

template <>
struct Codes<Q5_1> : FiveBitBlocks<Q5_1, 8, 4> {
  static constexpr bool has_mins = true;
};

template <>
struct Codes<Q8_0> : CodesDefaults {
  static constexpr bool signed_codes = true;
  static constexpr int chunk(int c, int i) {
    return 4 * c + i;
  }
  template <int c>
  static Bytes codes(const uint8_t* b) {
    const uint8_t* q = b + 2 * c * Q8_0::bytes + 2;
    return two_halves(load32(q), load32(q + Q8_0::bytes));
  }
  static HalfFloats scales(const uint8_t* b) {
    return eight_halves<Q8_0, 0>(b);
  }
};

template <>
struct Codes<IQ4_NL> : TableBlocks<IQ4_NL, 2, Iq4Codes> {};

template <>
struct Codes<MXFP4> : TableBlocks<MXFP4, 1, TableCodes<e2m1_doubled, 12>> {
  static constexpr bool far_scales = true;
  static HalfFloats scales(const uint8_t* b) {
    uint64_t exponents = 0;
    for (int i = 0; i < 8; ++i) {
      exponents |= uint64_t{b[i * MXFP4::bytes]} << 8 * i;
    }
    return powers_of_two(exponents);
  }
};

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA
