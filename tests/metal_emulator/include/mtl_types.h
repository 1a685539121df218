// Scalar and vector types, conversions and traits of the Metal language.
#pragma once
#include <stddef.h>
#include <stdint.h>

// Once with real address spaces, for type checking only; once without, to run.
#ifdef MTL_ADDRESS_SPACES
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2))) const
#define threadgroup __attribute__((address_space(3)))
#else
#define device
#define constant const
#define threadgroup
#endif
#define thread
#define kernel

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;
typedef __bf16 bfloat;

#define MTL_VECTORS(T)                                         \
  typedef T T##2 __attribute__((ext_vector_type(2)));          \
  typedef T T##3 __attribute__((ext_vector_type(3)));          \
  typedef T T##4 __attribute__((ext_vector_type(4)));          \
  typedef T packed_##T##2                                      \
      __attribute__((ext_vector_type(2), aligned(sizeof(T)))); \
  typedef T packed_##T##4                                      \
      __attribute__((ext_vector_type(4), aligned(sizeof(T))));
MTL_VECTORS(char)
MTL_VECTORS(uchar)
MTL_VECTORS(short)
MTL_VECTORS(ushort)
MTL_VECTORS(int)
MTL_VECTORS(uint)
MTL_VECTORS(long)
MTL_VECTORS(ulong)
MTL_VECTORS(half)
MTL_VECTORS(bfloat)
MTL_VECTORS(float)
#undef MTL_VECTORS
typedef bool bool2 __attribute__((ext_vector_type(2)));
typedef bool bool3 __attribute__((ext_vector_type(3)));
typedef bool bool4 __attribute__((ext_vector_type(4)));

namespace metal {
template <typename T, int N>
using vec = T __attribute__((ext_vector_type(N)));

template <typename T, T V>
struct integral_constant {
  static constexpr T value = V;
  constexpr operator T() const {
    return V;
  }
};
template <bool B>
using bool_constant = integral_constant<bool, B>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;

template <typename A, typename B>
struct is_same : bool_constant<__is_same(A, B)> {};
template <typename A, typename B>
constexpr bool is_same_v = __is_same(A, B);
template <bool B, typename T = void>
struct enable_if {};
template <typename T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool B, typename T = void>
using enable_if_t = typename enable_if<B, T>::type;
template <bool B, typename T, typename F>
struct conditional {
  typedef T type;
};
template <typename T, typename F>
struct conditional<false, T, F> {
  typedef F type;
};
template <bool B, typename T, typename F>
using conditional_t = typename conditional<B, T, F>::type;
template <typename T>
struct is_integral : bool_constant<__is_integral(T)> {};
template <typename T>
constexpr bool is_integral_v = __is_integral(T);
template <typename T>
struct is_floating_point : bool_constant<__is_floating_point(T)> {};
template <typename T>
constexpr bool is_floating_point_v = __is_floating_point(T);
template <typename T>
constexpr bool is_unsigned_v = __is_unsigned(T);
template <typename T>
constexpr bool is_signed_v = __is_signed(T);
template <typename T>
using remove_cv_t = __remove_cv(T);
template <typename T>
using remove_reference_t = __remove_reference_t(T);
template <typename T>
using make_unsigned_t = __make_unsigned(T);
template <typename T>
using make_signed_t = __make_signed(T);

template <typename T>
struct numeric_limits {
  static constexpr T max() {
    return T(
        __is_signed(T)
            ? (T(1) << (sizeof(T) * 8 - 2)) - 1 + (T(1) << (sizeof(T) * 8 - 2))
            : ~T(0));
  }
  static constexpr T min() {
    return T(~max());
  }
  static constexpr T lowest() {
    return min();
  }
};
#define MTL_FLOAT_LIMITS(T, largest, smallest, eps) \
  template <>                                       \
  struct numeric_limits<T> {                        \
    static constexpr T max() {                      \
      return T(largest);                            \
    }                                               \
    static constexpr T lowest() {                   \
      return T(-largest);                           \
    }                                               \
    static constexpr T min() {                      \
      return T(smallest);                           \
    }                                               \
    static constexpr T epsilon() {                  \
      return T(eps);                                \
    }                                               \
    static constexpr T infinity() {                 \
      return T(__builtin_inff());                   \
    }                                               \
    static constexpr T quiet_NaN() {                \
      return T(__builtin_nanf(""));                 \
    }                                               \
  };
MTL_FLOAT_LIMITS(float, 0x1.fffffep127f, 0x1p-126f, 0x1p-23f)
MTL_FLOAT_LIMITS(half, 65504.0f, 0x1p-14f, 0x1p-10f)
MTL_FLOAT_LIMITS(bfloat, 0x1.fep127f, 0x1p-126f, 0x1p-7f)
#undef MTL_FLOAT_LIMITS

template <typename To, typename From>
constexpr To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs equal sizes");
  return __builtin_bit_cast(To, from);
}
} // namespace metal

// What the rewritten source calls; `construct` stands for `type(values)`.
namespace mtl {
template <typename T>
struct shape {
  typedef T element;
  static constexpr int size = 0;
};
template <typename T, int N>
struct shape<T __attribute__((ext_vector_type(N)))> {
  typedef T element;
  static constexpr int size = N;
};

template <typename T>
constexpr int length_of = shape<T>::size ? shape<T>::size : 1;

template <typename V, typename T>
constexpr void append(V& to, int& at, T value) {
  typedef typename shape<V>::element E;
  if constexpr (shape<T>::size == 0) {
    to[at++] = E(value);
  } else {
    for (int i = 0; i < shape<T>::size; ++i) {
      to[at++] = E(value[i]);
    }
  }
}

template <typename T, typename... Args>
constexpr T construct(Args... args) {
  if constexpr (shape<T>::size == 0) {
    return T(args...);
  } else if constexpr (sizeof...(Args) == 0) {
    return T{};
  } else {
    constexpr int given = (length_of<Args> + ...);
    static_assert(
        given == shape<T>::size || (given == 1 && sizeof...(Args) == 1),
        "a vector needs one value or as many as it has elements");
    T result{};
    int at = 0;
    (append(result, at, args), ...);
    for (; at < shape<T>::size; ++at) {
      result[at] = result[0];
    }
    return result;
  }
}

// static_cast whose operand or result may be a vector.
template <typename T, typename From>
constexpr T cast(From&& from) {
  if constexpr (shape<T>::size != 0) {
    return construct<T>(from);
  } else {
    return static_cast<T>(static_cast<From&&>(from));
  }
}
} // namespace mtl

// Three packed elements have no vector type of their size.
#define MTL_PACKED3(T)                                \
  struct packed_##T##3 {                              \
    T x, y, z;                                        \
    packed_##T##3() = default;                        \
    packed_##T##3(T##3 v) : x(v.x), y(v.y), z(v.z) {} \
    operator T##3() const {                           \
      return T##3 {x, y, z};                          \
    }                                                 \
  };
MTL_PACKED3(char)
MTL_PACKED3(uchar)
MTL_PACKED3(short)
MTL_PACKED3(ushort)
MTL_PACKED3(int)
MTL_PACKED3(uint)
MTL_PACKED3(half)
MTL_PACKED3(float)
#undef MTL_PACKED3
