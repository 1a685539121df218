// Arithmetic functions of metal_stdlib.
#pragma once
#include "mtl_types.h"

#define METAL_FUNC inline __attribute__((__always_inline__))
#define INFINITY (__builtin_inff())
#define NAN (__builtin_nanf(""))
#define HUGE_VALF (__builtin_inff())
#define FLT_MAX 0x1.fffffep127f
#define FLT_MIN 0x1p-126f
#define FLT_EPSILON 0x1p-23f
#define HALF_MAX ((half)65504.0f)
#define HALF_MIN ((half)0x1p-14f)
#define MAXFLOAT FLT_MAX
#define MAXHALF HALF_MAX
#define M_PI_F 3.14159265358979323846f
#define M_E_F 2.71828182845904523536f
#define M_LN2_F 0.693147180559945309417f
#define M_LOG2E_F 1.44269504088896340736f
#define M_SQRT2_F 1.41421356237309504880f
#define UCHAR_MAX 255
#define USHRT_MAX 65535
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u

namespace metal {
#define MTL_FLOAT_SCALARS(F) F(float) F(half) F(bfloat)
#define MTL_INT_SCALARS(F) \
  F(char) F(uchar) F(short) F(ushort) F(int) F(uint) F(long) F(ulong)

// Overloads for a type and its vectors, applied element by element.
#define MTL_MAP1(name, R, T, n) \
  inline R##n name(T##n a) {    \
    R##n r{};                   \
    for (int i = 0; i < n; ++i) \
      r[i] = name(a[i]);        \
    return r;                   \
  }
#define MTL_MAP2(name, T, n)         \
  inline T##n name(T##n a, T##n b) { \
    T##n r{};                        \
    for (int i = 0; i < n; ++i)      \
      r[i] = name(a[i], b[i]);       \
    return r;                        \
  }
#define MTL_MAP3(name, T, n)                 \
  inline T##n name(T##n a, T##n b, T##n c) { \
    T##n r{};                                \
    for (int i = 0; i < n; ++i)              \
      r[i] = name(a[i], b[i], c[i]);         \
    return r;                                \
  }
#define MTL_UNARY(T, name, expression) \
  inline T name(T x) {                 \
    return T(expression);              \
  }                                    \
  MTL_MAP1(name, T, T, 2)              \
  MTL_MAP1(name, T, T, 3)              \
  MTL_MAP1(name, T, T, 4)
#define MTL_BINARY(T, name, expression) \
  inline T name(T x, T y) {             \
    return T(expression);               \
  }                                     \
  MTL_MAP2(name, T, 2)                  \
  MTL_MAP2(name, T, 3)                  \
  MTL_MAP2(name, T, 4)
#define MTL_TERNARY(T, name, expression) \
  inline T name(T x, T y, T z) {         \
    return T(expression);                \
  }                                      \
  MTL_MAP3(name, T, 2)                   \
  MTL_MAP3(name, T, 3)                   \
  MTL_MAP3(name, T, 4)

#define MTL_FLOAT_UNARY(T)                             \
  MTL_UNARY(T, exp, __builtin_expf(x))                 \
  MTL_UNARY(T, exp2, __builtin_exp2f(x))               \
  MTL_UNARY(T, log, __builtin_logf(x))                 \
  MTL_UNARY(T, log2, __builtin_log2f(x))               \
  MTL_UNARY(T, log10, __builtin_log10f(x))             \
  MTL_UNARY(T, sqrt, __builtin_sqrtf(x))               \
  MTL_UNARY(T, rsqrt, 1.0f / __builtin_sqrtf(x))       \
  MTL_UNARY(T, sin, __builtin_sinf(x))                 \
  MTL_UNARY(T, cos, __builtin_cosf(x))                 \
  MTL_UNARY(T, tanh, __builtin_tanhf(x))               \
  MTL_UNARY(T, floor, __builtin_floorf(x))             \
  MTL_UNARY(T, ceil, __builtin_ceilf(x))               \
  MTL_UNARY(T, trunc, __builtin_truncf(x))             \
  MTL_UNARY(T, round, __builtin_roundf(x))             \
  MTL_UNARY(T, rint, __builtin_rintf(x))               \
  MTL_UNARY(T, fabs, __builtin_fabsf(x))               \
  MTL_UNARY(T, abs, __builtin_fabsf(x))                \
  MTL_UNARY(T, sign, x > T(0) ? 1 : x < T(0) ? -1 : 0) \
  MTL_UNARY(T, saturate, x > T(0) ? (x < T(1) ? float(x) : 1.0f) : 0.0f)
MTL_FLOAT_SCALARS(MTL_FLOAT_UNARY)

#define MTL_FLOAT_BINARY(T)                          \
  MTL_BINARY(T, pow, __builtin_powf(x, y))           \
  MTL_BINARY(T, fmod, __builtin_fmodf(x, y))         \
  MTL_BINARY(T, copysign, __builtin_copysignf(x, y)) \
  MTL_BINARY(T, fmin, __builtin_fminf(x, y))         \
  MTL_BINARY(T, fmax, __builtin_fmaxf(x, y))         \
  MTL_BINARY(T, min, __builtin_fminf(x, y))          \
  MTL_BINARY(T, max, __builtin_fmaxf(x, y))          \
  MTL_BINARY(T, step, y < x ? 0 : 1)                 \
  MTL_TERNARY(T, mix, x + (y - x) * z)               \
  MTL_TERNARY(T, clamp, __builtin_fminf(__builtin_fmaxf(x, y), z))
MTL_FLOAT_SCALARS(MTL_FLOAT_BINARY)

#define MTL_INT_BINARY(T)                                                      \
  MTL_BINARY(T, min, x < y ? x : y)                                            \
  MTL_BINARY(T, max, x < y ? y : x)                                            \
  MTL_BINARY(T, absdiff, x < y ? y - x : x - y)                                \
  MTL_TERNARY(T, clamp, x<y ? y : x> z ? z : x)                                \
  MTL_UNARY(T, abs, x < T(0) ? T(-x) : x)                                      \
  MTL_UNARY(T, popcount, __builtin_popcountg(make_unsigned_t<T>(x)))           \
  MTL_UNARY(T, clz, __builtin_clzg(make_unsigned_t<T>(x), int(sizeof(T) * 8))) \
  MTL_UNARY(T, ctz, __builtin_ctzg(make_unsigned_t<T>(x), int(sizeof(T) * 8)))
MTL_INT_SCALARS(MTL_INT_BINARY)

// One rounding. The sum of an exact product and `c` is rounded to odd in
// double, which leaves the second rounding nothing to get wrong.
template <typename T>
inline T mtl_narrow_fma(T a, T b, T c) {
  double product = double(a) * double(b);
  double sum = product + double(c);
  double back = sum - product;
  double error = (product - (sum - back)) + (double(c) - back);
  if (error != 0 && sum - sum == 0) {
    ulong bits = __builtin_bit_cast(ulong, sum);
    if (!(bits & 1)) {
      bits += (error > 0) == (sum > 0) ? 1 : -1;
      sum = __builtin_bit_cast(double, bits);
    }
  }
  // Through float, rounded to odd as well: no processor narrows a double.
  float narrow = float(sum);
  if (double(narrow) != sum && narrow - narrow == 0) {
    uint bits = __builtin_bit_cast(uint, narrow);
    double magnitude = double(narrow) < 0 ? -double(narrow) : double(narrow);
    if (magnitude > (sum < 0 ? -sum : sum)) {
      --bits;
    }
    narrow = __builtin_bit_cast(float, bits | 1);
  }
  return T(narrow);
}
MTL_TERNARY(float, fma, __builtin_fmaf(x, y, z))
MTL_TERNARY(half, fma, mtl_narrow_fma(x, y, z))
MTL_TERNARY(bfloat, fma, mtl_narrow_fma(x, y, z))

#define MTL_DOT(T, n)             \
  inline T dot(T##n a, T##n b) {  \
    T sum = a[0] * b[0];          \
    for (int i = 1; i < n; ++i)   \
      sum = fma(a[i], b[i], sum); \
    return sum;                   \
  }
#define MTL_FLOAT_REST(T)             \
  MTL_DOT(T, 2)                       \
  MTL_DOT(T, 3)                       \
  MTL_DOT(T, 4)                       \
  inline bool isnan(T x) {            \
    return x != x;                    \
  }                                   \
  inline bool isinf(T x) {            \
    return __builtin_isinf(float(x)); \
  }                                   \
  inline bool isfinite(T x) {         \
    return x - x == T(0);             \
  }                                   \
  inline T ldexp(T x, int e) {        \
    return T(__builtin_ldexpf(x, e)); \
  }
MTL_FLOAT_SCALARS(MTL_FLOAT_REST)

namespace precise {
using namespace metal;
}
namespace fast {
using namespace metal;
}

template <typename T, typename C>
inline T select(T a, T b, C c) {
  if constexpr (mtl::shape<T>::size == 0) {
    return c ? b : a;
  } else {
    for (int i = 0; i < mtl::shape<T>::size; ++i) {
      a[i] = c[i] ? b[i] : a[i];
    }
    return a;
  }
}
template <typename V>
inline bool any(V v) {
  bool result = false;
  for (int i = 0; i < mtl::shape<V>::size; ++i) {
    result |= bool(v[i]);
  }
  return result;
}
template <typename V>
inline bool all(V v) {
  bool result = true;
  for (int i = 0; i < mtl::shape<V>::size; ++i) {
    result &= bool(v[i]);
  }
  return result;
}

template <typename T>
inline T extract_bits(T x, uint offset, uint bits) {
  constexpr uint width = sizeof(T) * 8;
  if (bits == 0) {
    return 0;
  }
  typedef make_unsigned_t<T> U;
  U up = U(U(x) << (width - offset - bits));
  return T(T(up) >> (width - bits));
}
template <typename T>
inline T insert_bits(T base, T insert, uint offset, uint bits) {
  typedef make_unsigned_t<T> U;
  U ones = bits >= sizeof(T) * 8 ? U(~U(0)) : U((U(1) << bits) - 1);
  return T((U(base) & ~U(ones << offset)) | U((U(insert) & ones) << offset));
}
template <typename T>
inline T rotate(T x, T by) {
  typedef make_unsigned_t<T> U;
  uint width = sizeof(T) * 8, n = uint(by) % width;
  return n ? T(U(U(x) << n) | U(U(x) >> (width - n))) : x;
}
inline uint reverse_bits(uint x) {
  return __builtin_bitreverse32(x);
}
inline uint mulhi(uint a, uint b) {
  return uint(ulong(a) * b >> 32);
}
inline int mulhi(int a, int b) {
  return int(long(a) * b >> 32);
}
inline int mul24(int a, int b) {
  return a * b;
}
inline uint mul24(uint a, uint b) {
  return a * b;
}
inline int mad24(int a, int b, int c) {
  return a * b + c;
}
inline uint mad24(uint a, uint b, uint c) {
  return a * b + c;
}

template <typename V>
inline V mtl_unpack8(uint x, bool is_signed) {
  V r{};
  for (int i = 0; i < 4; ++i) {
    uint byte = x >> 8 * i & 255;
    float value = is_signed ? float(int8_t(byte)) / 127 : float(byte) / 255;
    r[i] = value < -1 ? -1.0f : value;
  }
  return r;
}
inline float4 unpack_unorm4x8_to_float(uint x) {
  return mtl_unpack8<float4>(x, false);
}
inline float4 unpack_snorm4x8_to_float(uint x) {
  return mtl_unpack8<float4>(x, true);
}
inline half4 unpack_unorm4x8_to_half(uint x) {
  return mtl_unpack8<half4>(x, false);
}
inline half4 unpack_snorm4x8_to_half(uint x) {
  return mtl_unpack8<half4>(x, true);
}
} // namespace metal
using metal::as_type;
