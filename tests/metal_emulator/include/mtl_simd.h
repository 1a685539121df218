// Collectives, barriers, threadgroup memory and atomics.
#pragma once
#include "../runtime.h"
#include "mtl_math.h"

namespace mtl {
// The place of the call that a default argument belongs to.
struct Site : MtlSite {
  Site(
      const char* file = __builtin_FILE(),
      int line = __builtin_LINE(),
      int column = __builtin_COLUMN())
      : MtlSite{file, line, column} {}
};

// The values that the lanes of a simdgroup gave to one collective.
template <typename T>
struct Values {
  const unsigned char* slots;
  uint lanes;
  T operator[](uint lane) const {
    T value;
    __builtin_memcpy(&value, slots + lane * mtl_slot_bytes, sizeof value);
    return value;
  }
};

template <typename T>
inline Values<T> exchange(const char* op, MtlSite site, T value) {
  static_assert(sizeof(T) <= mtl_slot_bytes, "value too large to exchange");
  return {mtl_exchange(op, site, &value, sizeof value), mtl_lane->lanes};
}

inline uint lane() {
  return mtl_lane->thread_index_in_simdgroup;
}

// A tree, as hardware reduces; every lane gets the same bits.
template <typename T, typename F>
inline T reduce(Values<T> values, F combine) {
  T part[32];
  for (uint i = 0; i < values.lanes; ++i) {
    part[i] = values[i];
  }
  for (uint step = 16; step; step /= 2) {
    for (uint i = 0; i < step && i + step < values.lanes; ++i) {
      part[i] = combine(part[i], part[i + step]);
    }
  }
  return part[0];
}

template <typename T>
inline T pick(Values<T> values, uint from, MtlSite site) {
  if (from >= values.lanes) {
    mtl_fail("Expected a shuffle from a lane of the simdgroup", site);
  }
  return values[from];
}

template <typename T, int SiteIndex>
inline threadgroup T& threadgroup_variable() {
  return *(threadgroup T*)mtl_threadgroup(SiteIndex, sizeof(T), alignof(T));
}
} // namespace mtl

namespace metal {
enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8
};
inline mem_flags operator|(mem_flags a, mem_flags b) {
  return mem_flags(uint(a) | uint(b));
}
inline void threadgroup_barrier(mem_flags, mtl::Site site = mtl::Site()) {
  mtl_barrier("threadgroup_barrier", site);
}
inline void simdgroup_barrier(mem_flags, mtl::Site site = mtl::Site()) {
  mtl_exchange("simdgroup_barrier", site, "", 0);
}

#define MTL_REDUCE(name, expression)                                     \
  template <typename T>                                                  \
  inline T name(T value, mtl::Site site = mtl::Site()) {                 \
    return mtl::reduce(mtl::exchange(#name, site, value), [](T a, T b) { \
      return T(expression);                                              \
    });                                                                  \
  }
MTL_REDUCE(simd_sum, a + b)
MTL_REDUCE(simd_product, a* b)
MTL_REDUCE(simd_max, metal::max(a, b))
MTL_REDUCE(simd_min, metal::min(a, b))
MTL_REDUCE(simd_and, a& b)
MTL_REDUCE(simd_or, a | b)
MTL_REDUCE(simd_xor, a ^ b)
#undef MTL_REDUCE

template <typename T>
inline T simd_shuffle(T value, ushort from, mtl::Site site = mtl::Site()) {
  return mtl::pick(mtl::exchange("simd_shuffle", site, value), from, site);
}
template <typename T>
inline T simd_shuffle_xor(T value, ushort mask, mtl::Site site = mtl::Site()) {
  return mtl::pick(
      mtl::exchange("simd_shuffle_xor", site, value), mtl::lane() ^ mask, site);
}
// Lanes whose source would lie outside keep their value.
template <typename T>
inline T simd_shuffle_down(T value, ushort by, mtl::Site site = mtl::Site()) {
  auto values = mtl::exchange("simd_shuffle_down", site, value);
  uint from = mtl::lane() + by;
  return from < values.lanes ? values[from] : value;
}
template <typename T>
inline T simd_shuffle_up(T value, ushort by, mtl::Site site = mtl::Site()) {
  auto values = mtl::exchange("simd_shuffle_up", site, value);
  return mtl::lane() >= by ? values[mtl::lane() - by] : value;
}
template <typename T>
inline T simd_shuffle_rotate_down(
    T value, ushort by, mtl::Site site = mtl::Site()) {
  auto values = mtl::exchange("simd_shuffle_rotate_down", site, value);
  return values[(mtl::lane() + by) % values.lanes];
}
template <typename T>
inline T simd_broadcast(T value, ushort from, mtl::Site site = mtl::Site()) {
  return mtl::pick(mtl::exchange("simd_broadcast", site, value), from, site);
}
template <typename T>
inline T simd_broadcast_first(T value, mtl::Site site = mtl::Site()) {
  return mtl::exchange("simd_broadcast_first", site, value)[0];
}
template <typename T>
inline T simd_prefix_inclusive_sum(T value, mtl::Site site = mtl::Site()) {
  auto values = mtl::exchange("simd_prefix_inclusive_sum", site, value);
  T sum = values[0];
  for (uint i = 1; i <= mtl::lane(); ++i) {
    sum = T(sum + values[i]);
  }
  return sum;
}
template <typename T>
inline T simd_prefix_exclusive_sum(T value, mtl::Site site = mtl::Site()) {
  auto values = mtl::exchange("simd_prefix_exclusive_sum", site, value);
  T sum = T(0);
  for (uint i = 0; i < mtl::lane(); ++i) {
    sum = T(sum + values[i]);
  }
  return sum;
}
inline bool simd_any(bool value, mtl::Site site = mtl::Site()) {
  return mtl::reduce(
      mtl::exchange("simd_any", site, uint(value)),
      [](uint a, uint b) { return a | b; });
}
inline bool simd_all(bool value, mtl::Site site = mtl::Site()) {
  return mtl::reduce(
      mtl::exchange("simd_all", site, uint(value)),
      [](uint a, uint b) { return a & b; });
}
inline bool simd_is_first() {
  return mtl::lane() == 0;
}
template <typename T>
inline T quad_shuffle_xor(T value, ushort mask, mtl::Site site = mtl::Site()) {
  auto values = mtl::exchange("quad_shuffle_xor", site, value);
  return mtl::pick(values, mtl::lane() ^ (mask & 3), site);
}
template <typename T>
inline T quad_broadcast(T value, ushort from, mtl::Site site = mtl::Site()) {
  auto values = mtl::exchange("quad_broadcast", site, value);
  return mtl::pick(values, (mtl::lane() & ~3u) + (from & 3), site);
}
template <typename T>
inline T quad_sum(T value, mtl::Site site = mtl::Site()) {
  auto values = mtl::exchange("quad_sum", site, value);
  uint q = mtl::lane() & ~3u;
  return T(T(values[q] + values[q + 2]) + T(values[q + 1] + values[q + 3]));
}

enum memory_order { memory_order_relaxed };
template <typename T>
struct atomic {
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
// Lanes run one at a time, so plain accesses are atomic.
#define MTL_ATOMIC(name, expression)                         \
  template <typename A, typename V>                          \
  inline auto name(A* a, V v, memory_order) -> decltype(v) { \
    auto old = a->value;                                     \
    a->value = expression;                                   \
    return old;                                              \
  }
MTL_ATOMIC(atomic_fetch_add_explicit, old + v)
MTL_ATOMIC(atomic_fetch_sub_explicit, old - v)
MTL_ATOMIC(atomic_fetch_or_explicit, old | v)
MTL_ATOMIC(atomic_fetch_and_explicit, old& v)
MTL_ATOMIC(atomic_fetch_max_explicit, old < v ? v : old)
MTL_ATOMIC(atomic_fetch_min_explicit, old < v ? old : v)
MTL_ATOMIC(atomic_exchange_explicit, v)
MTL_ATOMIC(atomic_store_explicit, v)
#undef MTL_ATOMIC
template <typename A>
inline auto atomic_load_explicit(A* a, memory_order) {
  auto value = a->value;
  return value;
}
} // namespace metal
