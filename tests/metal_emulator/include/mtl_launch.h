// Turns a launch's slots and built-in values into a kernel's arguments.
#pragma once
#include "mtl_matrix.h"

namespace mtl {
template <int I, typename Head, typename... Tail>
struct nth : nth<I - 1, Tail...> {};
template <typename Head, typename... Tail>
struct nth<0, Head, Tail...> {
  typedef Head type;
};
template <typename F, int I>
struct parameter;
template <typename... P, int I>
struct parameter<void(P...), I> : nth<I, P...> {};

// A pointer or reference argument; its slot holds the buffer's address.
template <typename P>
struct buffer {
  static P from(void* slot) {
    return reinterpret_cast<P>(slot);
  }
};
template <typename T>
struct buffer<T&> {
  static T& from(void* slot) {
    return *reinterpret_cast<T*>(slot);
  }
};

template <typename P>
inline P builtin(const uint32_t (&value)[3]) {
  return construct<P>(value[0]);
}
template <typename P>
inline P builtin3(const uint32_t (&value)[3]) {
  typedef typename shape<P>::element E;
  if constexpr (shape<P>::size == 0) {
    return P(value[0]);
  } else {
    P result{};
    for (int i = 0; i < shape<P>::size; ++i) {
      result[i] = E(value[i]);
    }
    return result;
  }
}
} // namespace mtl
