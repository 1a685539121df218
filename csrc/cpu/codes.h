// Super-blocks of 256 weights as bytes, for integer products: what the types
// have in common is in fixed_gemv.h and fixed_gemm.h.
//
// A weight is scale * (code - bias) + min. A type gives, of the super-block at
// b,
//   codes<c>(b)        the c-th 64 of its codes, as bytes, in an order of its
//                      own: chunk(c, i) is which 16 consecutive weights lie in
//                      the i-th quarter
//   scales(b)          of every `group` weights: bytes, in all quarters, where
//                      whole_scales, else floats
//   mins(b)            where has_mins, likewise but bytes that do not repeat
// and where whole_scales, factors_at: of two f16 numbers that lie there the one
// that scales are to be multiplied by, and the factor of mins, are d_place and
// 1 - d_place.
#pragma once

#include "cpu/products.h"

namespace mlx_gguf::cpu::MLX_GGUF_ISA {
namespace {

struct CodesDefaults {
  static constexpr bool whole_scales = false;
  static constexpr bool signed_codes = false;
  static constexpr bool has_mins = false;
  static constexpr bool far_scales =
      false; // beyond what f32 sums times them hold
  static constexpr int group = 32;
  static constexpr int bias = 0;
};

template <typename Type>
struct Codes;

inline Bytes low_nibbles(Bytes q) {
  return bit_and(q, bytes_of(15));
}

inline Bytes high_nibbles(Bytes q) {
  return bit_and(shift_right<4>(q), bytes_of(15));
}

// ---- Blocks of 32 weights, eight to the super-block.

// f16 numbers of eight blocks.
template <typename Type, int at>
HalfFloats eight_halves(const uint8_t* b) {
  auto h = [&](int i) -> uint64_t {
    return read<uint16_t>(b + i * Type::bytes + at);
  };
  auto four = [&](int i) {
    return h(i) | h(i + 1) << 16 | h(i + 2) << 32 | h(i + 3) << 48;
  };
  return floats_of_halves(quarter_of(four(0), four(4)));
}

// Nibbles of four blocks: their first 16 weights (even c) or last 16.
template <typename Type, int at>
struct NibbleBlocks : CodesDefaults {
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

template <typename Type, int at>
struct TableBlocks : NibbleBlocks<Type, at> {
  static constexpr bool signed_codes = true;
  template <int c>
  static Bytes look_up(const uint8_t* b, const int8_t* table) {
    auto values = all_quarters(load16(table));
    return shuffle(values, NibbleBlocks<Type, at>::template codes<c>(b));
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
struct Codes<IQ4_NL> : TableBlocks<IQ4_NL, 2> {
  template <int c>
  static Bytes codes(const uint8_t* b) {
    return look_up<c>(b, iq4_values);
  }
};

template <>
struct Codes<MXFP4> : TableBlocks<MXFP4, 1> {
  static constexpr bool far_scales = true;
  template <int c>
  static Bytes codes(const uint8_t* b) {
    return look_up<c>(b, e2m1_doubled);
  }
  static HalfFloats scales(const uint8_t* b) {
    auto d = [&](int i) { return e8m0_half_to_float(b[i * MXFP4::bytes]); };
    return eight_floats(d(0), d(1), d(2), d(3), d(4), d(5), d(6), d(7));
  }
};

// ---- Super-blocks with whole scales. `largest` bounds |code * scale|.

struct WholeScales : CodesDefaults {
  static constexpr bool whole_scales = true;
};

// Eight numbers below 64, less 32, as signed bytes.
inline uint64_t less_32(uint64_t bytes) {
  constexpr uint64_t ones = 0x0101010101010101ull;
  // No borrow crosses a byte: the top bit is set before and turned after.
  return ((bytes | ones * 0x80) - ones * 32) ^ ones * 0x80;
}

// Eight fields of 4 or 2 bits, each to a byte of its own.
template <int bits>
inline uint64_t spread(uint64_t v) {
#ifdef __BMI2__
  return _pdep_u64(v, 0x0101010101010101ull * ((1 << bits) - 1));
#else
  if constexpr (bits == 2) {
    v = (v | v << 8) & 0x00ff00ffull;
    v = (v | v << 4) & 0x0f0f0f0full;
    v = (v | v << 2) & 0x33333333ull;
  }
  v = (v | v << 16) & 0x0000ffff0000ffffull;
  v = (v | v << 8) & 0x00ff00ff00ff00ffull;
  v = (v | v << 4) & 0x0f0f0f0f0f0f0f0full;
  return bits == 2 ? v & 0x0303030303030303ull : v;
#endif
}

// Eight scales of 6 bits, then eight mins, packed in 12 bytes.
struct SixBits {
  uint64_t scales, mins;
  explicit SixBits(const uint8_t* b) {
    uint32_t s = read<uint32_t>(b), m = read<uint32_t>(b + 4);
    uint32_t t = read<uint32_t>(b + 8);
    constexpr uint32_t six = 0x3f3f3f3f, four = 0x0f0f0f0f, two = 0x30303030;
    scales = uint64_t((t & four) | (s >> 2 & two)) << 32 | (s & six);
    mins = uint64_t((t >> 4 & four) | (m >> 2 & two)) << 32 | (m & six);
  }
};

template <typename Type>
struct NibblesWithMins : WholeScales {
  static constexpr bool has_mins = true;
  static constexpr int factors_at = 0, d_place = 0;
  // 32 bytes hold 32 weights in low nibbles and the next 32 in high ones.
  static constexpr int chunk(int c, int i) {
    return c / 2 * 8 + c % 2 * 2 + i / 2 * 4 + i % 2;
  }
  static Bytes scales(const uint8_t* b) {
    return all_eighths(SixBits(b + 4).scales);
  }
  static Quarter mins(const uint8_t* b) {
    return first_eighth(SixBits(b + 4).mins);
  }
};

template <>
struct Codes<Q4_K> : NibblesWithMins<Q4_K> {
  static constexpr int largest = 15 * 63;
  template <int c>
  static Bytes codes(const uint8_t* b) {
    Bytes q = load64(b + 16 + c / 2 * 64);
    return c % 2 ? high_nibbles(q) : low_nibbles(q);
  }
};

template <>
struct Codes<Q5_K> : NibblesWithMins<Q5_K> {
  static constexpr int largest = 31 * 63;
  template <int c>
  static Bytes codes(const uint8_t* b) {
    // Bit g of 32 bytes is the fifth of group g.
    constexpr int g = c / 2 * 4 + c % 2;
    Bytes fifth = bit_and(
        shift_right_halves<g, g + 2>(both_halves(load32(b + 16))), bytes_of(1));
    Bytes q = load64(b + 48 + c / 2 * 64);
    return bit_or(
        c % 2 ? high_nibbles(q) : low_nibbles(q), shift_left<4>(fifth));
  }
};

template <>
struct Codes<Q6_K> : WholeScales {
  static constexpr int group = 16;
  static constexpr int bias = 32;
  static constexpr int largest = 63 * 128;
  static constexpr int factors_at = 206, d_place = 1;
  static constexpr int chunk(int c, int i) {
    return 4 * c + i;
  }
  template <int c>
  static Bytes codes(const uint8_t* b) {
    // Each half of the block: low nibbles of 64 bytes, then high ones, and a
    // pair of bits of 32 bytes for each 32 weights.
    Bytes q = load64(b + c / 2 * 64);
    constexpr int pair = c % 2 * 4;
    Bytes top = bit_and(
        shift_right_halves<pair, pair + 2>(
            both_halves(load32(b + 128 + c / 2 * 32))),
        bytes_of(3));
    return bit_or(c % 2 ? high_nibbles(q) : low_nibbles(q), shift_left<4>(top));
  }
  static Bytes scales(const uint8_t* b) {
    return all_quarters(load16(b + 192));
  }
};

// Pairs of bits: 32 bytes for 128 weights, a pair for each run of 32.
struct BitPairs : WholeScales {
  static constexpr int group = 16;
  static constexpr int chunk(int c, int i) {
    return 2 * c + i / 2 * 8 + i % 2;
  }
  template <int c>
  static Bytes pairs(const uint8_t* q) {
    return bit_and(shift_right<2 * c>(load64(q)), bytes_of(3));
  }
};

template <>
struct Codes<Q2_K> : BitPairs {
  static constexpr bool has_mins = true;
  static constexpr int largest = 3 * 15;
  static constexpr int factors_at = 80, d_place = 0;
  template <int c>
  static Bytes codes(const uint8_t* b) {
    return pairs<c>(b + 16);
  }
  static Bytes scales(const uint8_t* b) {
    return low_nibbles(all_quarters(load16(b)));
  }
  static Quarter mins(const uint8_t* b) {
    return high_nibbles(load16(b));
  }
};

template <>
struct Codes<Q3_K> : BitPairs {
  static constexpr int bias = 4;
  static constexpr int largest = 7 * 32;
  static constexpr int factors_at = 106, d_place = 1;
  template <int c>
  static Bytes codes(const uint8_t* b) {
    Bytes third = bit_and(
        shift_right_halves<c, c + 4>(both_halves(load32(b))), bytes_of(1));
    return bit_or(pairs<c>(b + 32), shift_left<2>(third));
  }
  static Bytes scales(const uint8_t* b) {
    // Low nibbles of scales 0..7, high ones of 8..15, then pairs of top bits.
    uint64_t low = read<uint64_t>(b + 96);
    uint32_t top = read<uint32_t>(b + 104);
    constexpr uint64_t four = 0x0f0f0f0f0f0f0f0full;
    constexpr uint32_t two = 0x30303030;
    uint64_t first = uint64_t(top << 2 & two) << 32 | (top << 4 & two);
    uint64_t second = uint64_t(top >> 2 & two) << 32 | (top & two);
    Quarter all = quarter_of((low & four) | first, (low >> 4 & four) | second);
    return all_quarters(subtract_bytes(all, 32));
  }
};

template <>
struct Codes<IQ4_XS> : WholeScales {
  static constexpr bool signed_codes = !unsigned_codes;
  static constexpr int bias = signed_codes ? 0 : 128;
  static constexpr int largest = (signed_codes ? 127 : 241) * 32;
  static constexpr Table<uint8_t, 16> values{
      [](int i) { return iq4_values[i] + bias; }};
  static constexpr int factors_at = 0, d_place = 0;
  static constexpr int chunk(int c, int i) {
    return c / 2 * 8 + 2 * i + c % 2;
  }
  template <int c>
  static Bytes codes(const uint8_t* b) {
    Bytes q = load64(b + 8 + c / 2 * 64);
    return shuffle(
        all_quarters(load16(values.at)),
        c % 2 ? high_nibbles(q) : low_nibbles(q));
  }
  static Bytes scales(const uint8_t* b) {
    // Four low bits in nibbles, two high ones in pairs.
    uint64_t low = spread<4>(read<uint32_t>(b + 4));
    uint64_t high = spread<2>(read<uint16_t>(b + 2));
    return all_eighths(less_32(low | high << 4));
  }
};

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA
