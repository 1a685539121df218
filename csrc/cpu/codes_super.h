// Super-blocks whose scales are whole numbers: see codes.h.
#pragma once

#include "cpu/codes.h"

namespace mlx_gguf::cpu::MLX_GGUF_ISA {
namespace {

// Scales are bounded like codes in magnitude.
struct WholeScales : CodesDefaults {
  static constexpr bool whole_scales = true;
  static constexpr bool has_whole = true;
  static constexpr int run = 16;
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
  static constexpr int largest_code = 15, largest_scale = 63;
  template <int c>
  static Bytes codes(const uint8_t* b) {
    Bytes q = load64(b + 16 + c / 2 * 64);
    return c % 2 ? high_nibbles(q) : low_nibbles(q);
  }
};

template <>
struct Codes<Q5_K> : NibblesWithMins<Q5_K> {
  static constexpr int run = 8;
  static constexpr int largest_code = 31, largest_scale = 63;
  template <int c>
  static Bytes codes(const uint8_t* b) {
    // Bit g of 32 bytes is the fifth of group g.
    constexpr int g = c / 2 * 4 + c % 2;
    Bytes fifth =
        move_bits_of_halves<g, g + 2, 1, 4>(both_halves(load32(b + 16)));
    return nibbles_below<c % 2>(fifth, load64(b + 48 + c / 2 * 64));
  }
};

template <>
struct Codes<Q6_K> : WholeScales {
  static constexpr int group = 16;
  static constexpr int bias = 32;
  static constexpr int largest_code = 63, largest_scale = 128;
  static constexpr int run = 4;
  static constexpr bool signed_scales = true;
  static constexpr int factors_at = 206, d_place = 1;
  static constexpr int chunk(int c, int i) {
    return 4 * c + i;
  }
  template <int c>
  static Bytes codes(const uint8_t* b) {
    // Each half of the block: low nibbles of 64 bytes, then high ones, and a
    // pair of bits of 32 bytes for each 32 weights.
    constexpr int pair = c % 2 * 4;
    Bytes top = move_bits_of_halves<pair, pair + 2, 2, 4>(
        both_halves(load32(b + 128 + c / 2 * 32)));
    return nibbles_below<c % 2>(top, load64(b + c / 2 * 64));
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
    return move_bits<2 * c, 2, 0>(load64(q));
  }
};

template <>
struct Codes<Q2_K> : BitPairs {
  static constexpr bool has_mins = true;
  static constexpr int largest_code = 3, largest_scale = 15;
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
  static constexpr bool byte_products = unsigned_codes;
  // Four products for each scale, two of them to a word.
  static constexpr Table<uint8_t, 64> words{
      [](int i) { return i % 2 ? 128 : chunk(i % 16 / 4, i / 16); }};
  static constexpr Table<int16_t, 32> times{
      [](int i) { return i % 2 ? 0x0302 : 0x0100; }};
  static Bytes products(const uint8_t* b) {
    return multiply_words(
        shuffle(scales(b), load64(words.at)), load64(times.at));
  }
  template <int c>
  static Bytes scaled(const uint8_t* b, Bytes products) {
    return shuffle(products, move_bits<2 * c, 2, 0, 4 * c>(load64(b + 16)));
  }
};

template <>
struct Codes<Q3_K> : BitPairs {
  static constexpr int bias = 4;
  static constexpr int largest_code = 7, largest_scale = 32;
  static constexpr bool signed_scales = true;
  static constexpr int factors_at = 106, d_place = 1;
  // Two pairs and the bits above them, of the c-th 64 codes and others.
  template <int c>
  static Bytes six_bits(const uint8_t* b) {
    constexpr int half = c / 2 * 2;
    Bytes thirds =
        move_bits_of_halves<half, half + 4, 2, 4>(both_halves(load32(b)));
    return nibbles_below<c / 2>(thirds, load64(b + 32));
  }
  template <int c>
  static Bytes codes(const uint8_t* b) {
    return join_bits<c % 2 * 2, 2, 4 + c % 2, 1>(six_bits<c>(b));
  }
  // 32 more than they are.
  static Quarter raised_scales(const uint8_t* b) {
    // Low nibbles of scales 0..7, high ones of 8..15, then pairs of top bits.
    uint64_t low = read<uint64_t>(b + 96);
    uint32_t top = read<uint32_t>(b + 104);
    constexpr uint64_t four = 0x0f0f0f0f0f0f0f0full;
    constexpr uint32_t two = 0x30303030;
    uint64_t first = uint64_t(top << 2 & two) << 32 | (top << 4 & two);
    uint64_t second = uint64_t(top >> 2 & two) << 32 | (top & two);
    return quarter_of((low & four) | first, (low >> 4 & four) | second);
  }
  static Bytes scales(const uint8_t* b) {
    return all_quarters(subtract_bytes(raised_scales(b), 32));
  }
  // (code - 4) (raised - 32) is -124 to 128.
  static constexpr bool byte_products = unsigned_codes;
  static constexpr int product_bias = 127;
  // Eight products for each scale, two of them to a word: of the first 128
  // codes, or of the others.
  struct Products {
    Bytes of[2];
  };
  template <int half>
  static constexpr Table<uint8_t, 64> words{
      [](int i) { return i % 2 ? 128 : chunk(2 * half + i % 16 / 8, i / 16); }};
  static constexpr Table<int16_t, 32> times{[](int i) {
    int code = i % 4 * 2;
    return (code - 4) + 256 * (code + 1 - 4);
  }};
  static constexpr Table<uint16_t, 32> plus{[](int i) {
    int code = i % 4 * 2;
    return (255 - 32 * code) + 256 * (255 - 32 * (code + 1));
  }};
  static Products products(const uint8_t* b) {
    Bytes all = all_quarters(raised_scales(b));
    auto make = [](Words scales) {
      return add_words(
          multiply_words(scales, load64(times.at)), load64(plus.at));
    };
    return {
        {make(shuffle(all, load64(words<0>.at))),
         make(shuffle(all, load64(words<1>.at)))}};
  }
  template <int c>
  static Bytes scaled(const uint8_t* b, const Products& products) {
    constexpr int second = 8 * (c % 2);
    return shuffle(
        products.of[c / 2],
        join_bits<c % 2 * 2, 2, 4 + c % 2, 1, second>(six_bits<c>(b)));
  }
};

// Super-blocks of nibbles whose scales, times the factor, are floats.
template <>
struct Codes<IQ4_XS> : CodesDefaults {
  static constexpr int shared = 2;
  static constexpr bool signed_codes = Iq4Codes::signed_codes;
  static constexpr int bias = Iq4Codes::bias;
  static constexpr int chunk(int c, int i) {
    return c / 2 * 8 + 2 * i + c % 2;
  }
  template <int c>
  static Bytes codes(const uint8_t* b) {
    Bytes q = load64(b + 8 + c / 2 * 64);
    return Iq4Codes::look_up(c % 2 ? high_nibbles(q) : low_nibbles(q));
  }
  static constexpr bool has_whole = true;
  static constexpr int run = 4;
  static constexpr int factors_at = 0, d_place = 0;
  static uint64_t eight(const uint8_t* b) {
    // Four low bits in nibbles, two high ones in pairs.
    uint64_t low = spread<4>(read<uint32_t>(b + 4));
    uint64_t high = spread<2>(read<uint16_t>(b + 2));
    return less_32(low | high << 4);
  }
  static Bytes whole(const uint8_t* b) {
    return all_eighths(eight(b));
  }
  static HalfFloats scales(const uint8_t* b) {
    return multiply(
        floats_of_eight(first_eighth(eight(b))),
        eight_of_half(read<uint16_t>(b)));
  }
};

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA
