// Vectors of 64 bytes with NEON: four registers, a quarter each.
#pragma once

#include <arm_neon.h>

#include "cpu/simd_table.h"

namespace mlx_gguf::cpu::MLX_GGUF_ISA {
namespace {

using Quarter = uint8x16_t;
struct Half {
  Quarter low, high;
};
struct HalfFloats {
  float32x4_t low, high;
};
struct Bytes {
  Quarter at[4];
};
using Words = Bytes;
using Ints = Bytes;
struct Floats {
  float32x4_t at[4];
};

// f on every quarter.
template <typename F>
inline __attribute__((always_inline)) Bytes each(F f) {
  return {f(0), f(1), f(2), f(3)};
}

template <typename F>
inline __attribute__((always_inline)) Floats each_float(F f) {
  return {f(0), f(1), f(2), f(3)};
}

inline uint16x8_t u16(Quarter a) {
  return vreinterpretq_u16_u8(a);
}

inline int16x8_t s16(Quarter a) {
  return vreinterpretq_s16_u8(a);
}

inline int32x4_t s32(Quarter a) {
  return vreinterpretq_s32_u8(a);
}

inline int8x16_t s8(Quarter a) {
  return vreinterpretq_s8_u8(a);
}

inline Quarter bytes(uint16x8_t a) {
  return vreinterpretq_u8_u16(a);
}

inline Quarter bytes(int16x8_t a) {
  return vreinterpretq_u8_s16(a);
}

inline Quarter bytes(int32x4_t a) {
  return vreinterpretq_u8_s32(a);
}

inline Quarter load16(const void* p) {
  return vld1q_u8(static_cast<const uint8_t*>(p));
}

inline Half load32(const void* p) {
  auto at = static_cast<const uint8_t*>(p);
  return {load16(at), load16(at + 16)};
}

inline Bytes load64(const void* p) {
  auto at = static_cast<const uint8_t*>(p);
  return each([&](int i) { return load16(at + 16 * i); });
}

inline void store_words(int16_t* to, Words a) {
  for (int i = 0; i < 4; ++i) {
    vst1q_s16(to + 8 * i, s16(a.at[i]));
  }
}

// Eight bytes each.
inline Quarter quarter_of(uint64_t a, uint64_t b) {
  return vcombine_u8(vcreate_u8(a), vcreate_u8(b));
}

// Four bytes each.
inline Quarter quarter_of(int32_t a, int32_t b, int32_t c, int32_t d) {
  int32x4_t all = vdupq_n_s32(a);
  all = vsetq_lane_s32(b, all, 1);
  all = vsetq_lane_s32(c, all, 2);
  return bytes(vsetq_lane_s32(d, all, 3));
}

// The first eight bytes; the others are zeros.
inline Quarter first_eighth(uint64_t a) {
  return quarter_of(a, 0);
}

// The first eight bytes of each.
inline Quarter first_eighths(Quarter a, Quarter b) {
  return vcombine_u8(vget_low_u8(a), vget_low_u8(b));
}

inline Half half_of(Quarter a, Quarter b) {
  return {a, b};
}

inline Bytes two_halves(Half a, Half b) {
  return {a.low, a.high, b.low, b.high};
}

inline Floats two_halves(HalfFloats a, HalfFloats b) {
  return {a.low, a.high, b.low, b.high};
}

inline Bytes both_halves(Half a) {
  return two_halves(a, a);
}

inline Bytes all_quarters(Quarter a) {
  return {a, a, a, a};
}

inline Bytes all_eighths(uint64_t a) {
  return all_quarters(vreinterpretq_u8_u64(vdupq_n_u64(a)));
}

inline Bytes bytes_of(int value) {
  return all_quarters(vdupq_n_u8(static_cast<uint8_t>(value)));
}

inline Words words_of(int value) {
  return all_quarters(bytes(vdupq_n_s16(static_cast<int16_t>(value))));
}

inline Quarter first_quarter(Bytes a) {
  return a.at[0];
}

inline Quarter high_nibbles(Quarter q) {
  return vshrq_n_u8(q, 4);
}

inline Quarter subtract_bytes(Quarter a, int value) {
  return vsubq_u8(a, vdupq_n_u8(static_cast<uint8_t>(value)));
}

inline Bytes bit_and(Bytes a, Bytes b) {
  return each([&](int i) { return vandq_u8(a.at[i], b.at[i]); });
}

inline Bytes bit_or(Bytes a, Bytes b) {
  return each([&](int i) { return vorrq_u8(a.at[i], b.at[i]); });
}

inline Bytes add_bytes(Bytes a, Bytes b) {
  return each([&](int i) { return vaddq_u8(a.at[i], b.at[i]); });
}

inline Words add_words(Words a, Words b) {
  return each(
      [&](int i) { return bytes(vaddq_u16(u16(a.at[i]), u16(b.at[i]))); });
}

inline Words multiply_words(Words a, Words b) {
  return each(
      [&](int i) { return bytes(vmulq_u16(u16(a.at[i]), u16(b.at[i]))); });
}

// Adds the squares of words to some of the lanes.
inline Ints add_squares(Ints sum, Words a) {
  return each([&](int i) {
    int16x8_t w = s16(a.at[i]);
    int32x4_t s = vmlal_s16(s32(sum.at[i]), vget_low_s16(w), vget_low_s16(w));
    return bytes(vmlal_high_s16(s, w, w));
  });
}

// Words shifted by a constant: right with zeros, right with the sign, left.
template <int n>
Quarter shift_right(Quarter a) {
  if constexpr (n == 0) {
    return a;
  } else {
    return bytes(vshrq_n_u16(u16(a), n));
  }
}

template <int n>
Words shift_right(Words a) {
  return each([&](int i) { return shift_right<n>(a.at[i]); });
}

template <int n>
Words shift_right_signed(Words a) {
  return each([&](int i) { return bytes(vshrq_n_s16(s16(a.at[i]), n)); });
}

template <int n>
Words shift_left(Words a) {
  return each([&](int i) { return bytes(vshlq_n_u16(u16(a.at[i]), n)); });
}

// The first 32 bytes by one constant, the others by another.
template <int low, int high>
Words shift_right_halves(Words a) {
  return {
      shift_right<low>(a.at[0]),
      shift_right<low>(a.at[1]),
      shift_right<high>(a.at[2]),
      shift_right<high>(a.at[3])};
}

// table[index] within each 16 bytes.
inline Bytes shuffle(Bytes table, Bytes index) {
  return each([&](int i) { return vqtbl1q_u8(table.at[i], index.at[i]); });
}

// Adds `value` to the bytes whose bit is set.
inline Bytes add_where(Bytes a, uint64_t bits, int value) {
  const Quarter all = first_eighth(bits);
  const Quarter bit = quarter_of(0x8040201008040201, 0x8040201008040201);
  const Quarter add = vdupq_n_u8(static_cast<uint8_t>(value));
  return each([&](int i) {
    // Two bytes of bits, eight times each.
    uint64_t first = 0x0202020202020202ull * i;
    Quarter place = quarter_of(first, first + 0x0101010101010101ull);
    Quarter set = vtstq_u8(vqtbl1q_u8(all, place), bit);
    return vaddq_u8(a.at[i], vandq_u8(set, add));
  });
}

// Words at even places, and those at odd ones, of 16.
inline void split_words(const int16_t* from, int16_t* even, int16_t* odd) {
  int16x8x2_t a = vld2q_s16(from);
  vst1q_s16(even, a.val[0]);
  vst1q_s16(odd, a.val[1]);
}

inline Ints no_ints() {
  return all_quarters(vdupq_n_u8(0));
}

inline Floats to_floats(Ints a) {
  return each_float([&](int i) { return vcvtq_f32_s32(s32(a.at[i])); });
}

inline Floats load_floats(const float* p) {
  return each_float([&](int i) { return vld1q_f32(p + 4 * i); });
}

inline void store_floats(float* p, Floats a) {
  for (int i = 0; i < 4; ++i) {
    vst1q_f32(p + 4 * i, a.at[i]);
  }
}

inline Floats floats_of(float value) {
  return each_float([&](int) { return vdupq_n_f32(value); });
}

// The first eight lanes, and the others.
inline Floats floats_of(float low, float high) {
  return each_float([&](int i) { return vdupq_n_f32(i < 2 ? low : high); });
}

inline Floats repeat_floats(const float* eight) {
  return each_float([&](int i) { return vld1q_f32(eight + i % 2 * 4); });
}

inline HalfFloats floats_of_halves(Quarter h) {
  float16x8_t all = vreinterpretq_f16_u8(h);
  return {vcvt_f32_f16(vget_low_f16(all)), vcvt_high_f32_f16(all)};
}

inline HalfFloats eight_of(float value) {
  return {vdupq_n_f32(value), vdupq_n_f32(value)};
}

inline HalfFloats eight_of_half(uint16_t value) {
  return floats_of_halves(bytes(vdupq_n_u16(value)));
}

inline HalfFloats floats_of_eight(Quarter signed_bytes) {
  int16x8_t words = vmovl_s8(vget_low_s8(s8(signed_bytes)));
  return {
      vcvtq_f32_s32(vmovl_s16(vget_low_s16(words))),
      vcvtq_f32_s32(vmovl_high_s16(words))};
}

// 2^(e - 128) of each byte e.
inline HalfFloats powers_of_two(uint64_t exponents) {
  uint16x8_t words = vmovl_u8(vget_low_u8(first_eighth(exponents)));
  auto powers = [](uint32x4_t e) {
    uint32x4_t normal = vshlq_n_u32(vsubq_u32(e, vdupq_n_u32(1)), 23);
    uint32x4_t small =
        vshlq_u32(vdupq_n_u32(1 << 21), vreinterpretq_s32_u32(e));
    uint32x4_t is_small = vcltq_u32(e, vdupq_n_u32(2));
    return vreinterpretq_f32_u32(vbslq_u32(is_small, small, normal));
  };
  return {
      powers(vmovl_u16(vget_low_u16(words))), powers(vmovl_high_u16(words))};
}

inline void store_eight(float* p, HalfFloats a) {
  vst1q_f32(p, a.low);
  vst1q_f32(p + 4, a.high);
}

inline HalfFloats first_half(Floats a) {
  return {a.at[0], a.at[1]};
}

inline HalfFloats second_half(Floats a) {
  return {a.at[2], a.at[3]};
}

inline Floats multiply(Floats a, Floats b) {
  return each_float([&](int i) { return vmulq_f32(a.at[i], b.at[i]); });
}

inline Floats add(Floats a, Floats b) {
  return each_float([&](int i) { return vaddq_f32(a.at[i], b.at[i]); });
}

inline HalfFloats multiply(HalfFloats a, HalfFloats b) {
  return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)};
}

inline HalfFloats add(HalfFloats a, HalfFloats b) {
  return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)};
}

inline Floats multiply_add(Floats a, Floats b, Floats c) {
  return each_float(
      [&](int i) { return vfmaq_f32(c.at[i], a.at[i], b.at[i]); });
}

inline HalfFloats multiply_add(HalfFloats a, HalfFloats b, HalfFloats c) {
  return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
}

inline Floats floats_of_bytes(Quarter signed_bytes) {
  int16x8_t low = vmovl_s8(vget_low_s8(s8(signed_bytes)));
  int16x8_t high = vmovl_high_s8(s8(signed_bytes));
  return {
      vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
      vcvtq_f32_s32(vmovl_high_s16(low)),
      vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
      vcvtq_f32_s32(vmovl_high_s16(high))};
}

// Lane i takes from[Of::at(i / 4)].
template <typename Of>
Floats pick(HalfFloats from) {
  auto quarter = [&]<int i>() {
    constexpr int lane = Of::at(i);
    return vdupq_laneq_f32(lane < 4 ? from.low : from.high, lane % 4);
  };
  return {
      quarter.template operator()<0>(),
      quarter.template operator()<1>(),
      quarter.template operator()<2>(),
      quarter.template operator()<3>()};
}

// The sum of all lanes, always by the same tree.
inline float sum_lanes(HalfFloats a) {
  return vaddvq_f32(vaddq_f32(a.low, a.high));
}

// What gemm reads of rows of x, a pair of words each: the first words of rows
// 0 to 7, then the second ones, and the same of the others; and of a row of
// weights.
struct Pairs {
  int16x8x2_t at[2];
};
using PairInAll = int16x4_t;

inline Pairs load_pairs(const int32_t* p) {
  auto words = reinterpret_cast<const int16_t*>(p);
  return {vld2q_s16(words), vld2q_s16(words + 16)};
}

inline PairInAll pair_in_all(const int16_t* p) {
  return vreinterpret_s16_s32(vdup_n_s32(two_words(p)));
}

inline Ints dot(Ints sum, Pairs a, PairInAll b) {
  return each([&](int i) {
    int32x4_t s = s32(sum.at[i]);
    for (int word = 0; word < 2; ++word) {
      int16x8_t rows = a.at[i / 2].val[word];
      int16x4_t w = word ? vdup_lane_s16(b, 1) : vdup_lane_s16(b, 0);
      s = i % 2 ? vmlal_high_s16(s, rows, vcombine_s16(w, w))
                : vmlal_s16(s, vget_low_s16(rows), w);
    }
    return bytes(s);
  });
}

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA
