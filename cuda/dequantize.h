// y[M, K] = rows of w as plain numbers: a thread a piece of 16.
#pragma once
#include "rows.h"

// A piece as it is stored: whole vectors where rows are whole pieces, which
// packed types' are.
template <typename T>
struct alignas(16) Piece {
  T values[16];
};

template <typename F, typename T>
__global__ void __launch_bounds__(128)
    dequantize(const uint8_t* __restrict__ w, T* y, Params p) {
  uint32_t pieces = (p.K + 15) / 16;
  uint64_t i = blockIdx.x * 128ull + threadIdx.x;
  if (i >= uint64_t(pieces) * p.M) {
    return;
  }
  // A division of 64 bits costs more than the piece.
  uint32_t row = i >> 32 ? uint32_t(i / pieces) : uint32_t(i) / pieces;
  uint32_t piece = uint32_t(i - uint64_t(row) * pieces);
  float values[16];
  Row<F>::decode(w + row * Row<F>::size(p.K), piece, p.K, values);
  y += uint64_t(row) * p.K + 16 * piece;
  if (p.K % 16 == 0) {
    Piece<T> out;
    UNROLL
    for (uint32_t j = 0; j < 16; ++j) {
      out.values[j] = narrow<T>(values[j]);
    }
    *(Piece<T>*)y = out;
    return;
  }
  UNROLL
  for (uint32_t j = 0; j < 16; ++j) {
    if (16 * piece + j < p.K) {
      y[j] = narrow<T>(values[j]);
    }
  }
}
