// simdgroup_matrix: an 8x8 matrix of which every lane holds two neighbours of
// a row, in the order that Apple's GPUs use.
#pragma once
#include "mtl_simd.h"

namespace mtl {
inline uint matrix_row() {
  return (lane() / 4 & 4) + lane() / 2 % 4;
}
inline uint matrix_column() {
  return (lane() / 4 & 2) * 2 + lane() % 2 * 2;
}

#ifdef MTL_ADDRESS_SPACES
template <typename P>
struct is_matrix_memory : metal::false_type {};
template <typename T>
struct is_matrix_memory<device T*> : metal::true_type {};
template <typename T>
struct is_matrix_memory<threadgroup T*> : metal::true_type {};
#else
template <typename P>
struct is_matrix_memory : metal::true_type {};
#endif
template <typename T>
T by_value(T);
} // namespace mtl

namespace metal {
template <typename T, int Columns, int Rows>
struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "simdgroup_matrix is 8x8");
  typedef vec<T, 2> storage_type;
  storage_type elements;
  simdgroup_matrix() {
    // Nothing defines these; all ones is a NaN.
    __builtin_memset(&elements, 0xff, sizeof elements);
  }
  explicit simdgroup_matrix(T diagonal) {
    for (uint i = 0; i < 2; ++i) {
      elements[i] =
          mtl::matrix_row() == mtl::matrix_column() + i ? diagonal : T(0);
    }
  }
  storage_type& thread_elements() {
    return elements;
  }
  const storage_type& thread_elements() const {
    return elements;
  }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <typename T, int Columns, int Rows>
inline simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(
    T value) {
  simdgroup_matrix<T, Columns, Rows> m;
  m.elements = value;
  return m;
}
template <typename T, int Columns, int Rows>
inline simdgroup_matrix<T, Columns, Rows> make_diagonal_simdgroup_matrix(
    T value) {
  return simdgroup_matrix<T, Columns, Rows>(value);
}

template <typename T, typename P>
inline void simdgroup_load(
    simdgroup_matrix<T, 8, 8>& m,
    P from,
    ulong elements_per_row = 8,
    ulong2 origin = 0,
    bool transpose = false) {
  static_assert(mtl::is_matrix_memory<P>::value, "device or threadgroup only");
  static_assert(
      is_same_v<decltype(mtl::by_value(from[0])), T>, "element types differ");
  for (uint i = 0; i < 2; ++i) {
    ulong row = mtl::matrix_row(), column = mtl::matrix_column() + i;
    ulong y = origin.y + (transpose ? column : row);
    ulong x = origin.x + (transpose ? row : column);
    m.elements[i] = from[y * elements_per_row + x];
  }
}
template <typename T, typename P>
inline void simdgroup_store(
    simdgroup_matrix<T, 8, 8> m,
    P to,
    ulong elements_per_row = 8,
    ulong2 origin = 0,
    bool transpose = false) {
  static_assert(mtl::is_matrix_memory<P>::value, "device or threadgroup only");
  static_assert(
      is_same_v<decltype(mtl::by_value(to[0])), T>, "element types differ");
  for (uint i = 0; i < 2; ++i) {
    ulong row = mtl::matrix_row(), column = mtl::matrix_column() + i;
    ulong y = origin.y + (transpose ? column : row);
    ulong x = origin.x + (transpose ? row : column);
    to[y * elements_per_row + x] = m.elements[i];
  }
}

// Products and sums in f32; D is rounded once.
template <typename D, typename A, typename B, typename C>
inline void simdgroup_multiply_accumulate(
    simdgroup_matrix<D, 8, 8>& d,
    simdgroup_matrix<A, 8, 8> a,
    simdgroup_matrix<B, 8, 8> b,
    simdgroup_matrix<C, 8, 8> c,
    mtl::Site site = mtl::Site()) {
  struct Pair {
    float a[2];
    float b[2];
  };
  if (mtl_lane->lanes != 32) {
    mtl_fail("Expected a full simdgroup at a matrix product", site);
  }
  Pair mine;
  for (uint i = 0; i < 2; ++i) {
    mine.a[i] = float(a.elements[i]);
    mine.b[i] = float(b.elements[i]);
  }
  auto all = mtl::exchange("simdgroup_multiply_accumulate", site, mine);
  float sum[2] = {float(c.elements[0]), float(c.elements[1])};
  uint row = mtl::matrix_row(), column = mtl::matrix_column();
  auto holder = [](uint y, uint x) {
    return (y & 4) * 4 + (x & 4) * 2 + (y & 3) * 2 + (x >> 1 & 1);
  };
  for (uint k = 0; k < 8; ++k) {
    float left = all[holder(row, k)].a[k & 1];
    Pair right = all[holder(k, column)];
    sum[0] = __builtin_fmaf(left, right.b[0], sum[0]);
    sum[1] = __builtin_fmaf(left, right.b[1], sum[1]);
  }
  d.elements[0] = D(sum[0]);
  d.elements[1] = D(sum[1]);
}
template <typename D, typename A, typename B>
inline void simdgroup_multiply(
    simdgroup_matrix<D, 8, 8>& d,
    simdgroup_matrix<A, 8, 8> a,
    simdgroup_matrix<B, 8, 8> b,
    mtl::Site site = mtl::Site()) {
  auto zero = make_filled_simdgroup_matrix<D, 8, 8>(D(0));
  simdgroup_multiply_accumulate(d, a, b, zero, site);
}
} // namespace metal
