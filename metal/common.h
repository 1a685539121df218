#pragma once
#include <metal_simdgroup>
#include <metal_simdgroup_matrix>
#include <metal_stdlib>

#include "params.h"

using namespace metal;

// For loops whose arrays must stay in registers: their indices have to be
// constants.
#define UNROLL _Pragma("clang loop unroll(full)")

// The buffers of every kernel: w 0, x 1, c 2, y 3, params 4, lhs 5, rhs 6. One
// that a launch does not use is never read and may hold anything.

// A register that holds an activation. A half is a free operand of a 32-bit
// fma; bfloat is not, so it is widened once.
template <typename T>
struct HeldAs {
  typedef float type;
};
template <>
struct HeldAs<half> {
  typedef half type;
};
template <typename T>
using Held = typename HeldAs<T>::type;

// Two 16-bit pieces as the 32-bit word they are in memory, for blocks that are
// aligned to 2 bytes only.
inline uint word(device const ushort* p, uint i) {
  return as_type<uint>(ushort2(p[i], p[i + 1]));
}

// Batch entry z reads x matrix lhs[z] and w matrix rhs[z], or the z-th of each.
inline ulong x_offset(constant Params& p, device const uint* lhs, uint z) {
  return (p.gather ? lhs[z] : z) * ulong(p.x_step);
}
inline ulong w_offset(constant Params& p, device const uint* rhs, uint z) {
  return (p.gather ? rhs[z] : z) * ulong(p.w_step);
}

// The epilogue of one element. fma is spelt out here and in every sum of the
// kernels: what the compiler may contract it could contract in one
// instantiation and not in another, and rows would depend on their batch.
template <typename T>
inline void finish(
    constant Params& p, device const T* c, device T* y, ulong i, float sum) {
  float value = p.alpha * sum;
  if (p.has_c) {
    value = fma(p.beta, float(c[i]), value);
  }
  y[i] = T(value);
}
