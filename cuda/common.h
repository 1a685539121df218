// Numbers, loads and the tensor cores' instruction, without CUDA's headers: the
// run-time compiler alone is enough to build these kernels.
#pragma once

typedef unsigned char uint8_t;
typedef signed char int8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;

#include "params.h"

#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")

// 16-bit numbers are carried as their bits.
struct half_t {
  uint16_t bits;
};
struct bfloat_t {
  uint16_t bits;
};

DEVICE float as_float(uint32_t bits) {
  return __uint_as_float(bits);
}
DEVICE float half_to_float(uint32_t bits) {
  float out;
  asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}"
      : "=f"(out)
      : "r"(bits));
  return out;
}
DEVICE float low_half(uint32_t two) {
  float out;
  asm("{.reg .b16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}"
      : "=f"(out)
      : "r"(two));
  return out;
}
DEVICE float high_half(uint32_t two) {
  float out;
  asm("{.reg .b16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, b;}"
      : "=f"(out)
      : "r"(two));
  return out;
}
// Two numbers as f16, the first in the low half.
DEVICE uint32_t to_halves(float low, float high) {
  uint32_t out;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
DEVICE uint32_t mul2(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
DEVICE uint32_t add2(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
DEVICE uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t out;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}
// __byte_perm for a selector whose nibbles are under 8 as they come: it would
// mask them once more.
DEVICE uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(selector));
  return out;
}
// One half of a pair in both.
DEVICE uint32_t both_low(uint32_t two) {
  return __byte_perm(two, two, 0x1010);
}
DEVICE uint32_t both_high(uint32_t two) {
  return __byte_perm(two, two, 0x3232);
}

DEVICE float widen(float v) {
  return v;
}
DEVICE float widen(half_t v) {
  return half_to_float(v.bits);
}
DEVICE float widen(bfloat_t v) {
  return as_float(uint32_t(v.bits) << 16);
}
template <typename T>
DEVICE T narrow(float v);
template <>
DEVICE float narrow<float>(float v) {
  return v;
}
template <>
DEVICE half_t narrow<half_t>(float v) {
  uint16_t out;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(v));
  return {out};
}
template <>
DEVICE bfloat_t narrow<bfloat_t>(float v) {
  uint16_t out;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(v));
  return {out};
}

// Two 16-bit pieces as the 32-bit word they are in memory, for blocks that are
// aligned to 2 bytes only.
DEVICE uint32_t word(const uint16_t* p, uint32_t i) {
  return p[i] | uint32_t(p[i + 1]) << 16;
}

// d += A B for 16 rows, 8 columns and a depth of 16. Lane 4 g + t holds of A
// (f16) rows g (a0, a2) and g + 8 (a1, a3) at depths 2t, 2t + 1 (a0, a1) and
// 8 more (a2, a3); of B column g at the same depths (b0; b1); of d columns 2t
// and 2t + 1 of row g (d[0], d[1]) and of row g + 8.
DEVICE void mma(
    float (&d)[4],
    uint32_t a0,
    uint32_t a1,
    uint32_t a2,
    uint32_t a3,
    uint32_t b0,
    uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Of a kernel that is launched while the one before it still runs: what comes
// before waits for nothing, and reads nothing that a kernel before it in the
// graph wrote.
DEVICE void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the next kernel start, as far as there is room, once all blocks are
// here.
DEVICE void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Batch entry z reads x matrix lhs[z] and w matrix rhs[z], or the z-th of each.
DEVICE uint64_t x_offset(const Params& p, const uint32_t* lhs, uint32_t z) {
  return (p.gather ? min(lhs[z], p.last_x) : z) * p.x_step;
}
DEVICE uint32_t matrix_of(const Params& p, const uint32_t* rhs, uint32_t z) {
  return p.gather ? min(rhs[z], p.last_w) : z;
}
DEVICE uint64_t w_offset(const Params& p, const uint32_t* rhs, uint32_t z) {
  return matrix_of(p, rhs, z) * p.w_step;
}

// The epilogue of one element.
template <typename T>
DEVICE void finish(const Params& p, const T* c, T* y, uint64_t i, float sum) {
  float value = p.alpha * sum;
  if (p.has_c) {
    value = fmaf(p.beta, widen(c[i]), value);
  }
  y[i] = narrow<T>(value);
}
