// y[M, K] = rows of w as plain numbers: a thread a piece of 16.
#pragma once
#include "rows.h"

template <typename T>
struct alignas(16) Piece {
  static constexpr uint32_t vectors = sizeof(T); // it is, of 16 bytes
  T values[16];
};

template <typename F, typename T>
__global__ void __launch_bounds__(128)
    dequantize(const uint8_t* __restrict__ w, T* y, Params p) {
  constexpr uint32_t vectors = Piece<T>::vectors;
  __shared__ Piece<T> staged[128];
  uint32_t pieces = (p.K + 15) / 16, lane = threadIdx.x % 32;
  uint64_t i = blockIdx.x * 128ull + threadIdx.x;
  uint64_t all = uint64_t(pieces) * p.M;
  // A division of 64 bits costs more than the piece.
  uint32_t row = i >> 32 ? uint32_t(i / pieces) : uint32_t(i) / pieces;
  uint32_t piece = uint32_t(i - uint64_t(row) * pieces);
  float values[16] = {};
  if (i < all) {
    Row<F>::decode(w + row * Row<F>::size(p.K), piece, p.K, values);
  }
  if (p.K % 16 == 0) {
    // Pieces follow each other in y, so that a warp writes one stretch of
    // memory; by way of shared memory its lanes write whole sectors.
    UNROLL
    for (uint32_t j = 0; j < 16; ++j) {
      staged[threadIdx.x].values[j] = narrow<T>(values[j]);
    }
    __syncwarp();
    uint64_t first = i - lane;
    const uint4* from = (const uint4*)(staged + threadIdx.x - lane);
    uint4* to = (uint4*)(y + 16 * first);
    UNROLL
    for (uint32_t j = 0; j < vectors; ++j) {
      uint32_t at = 32 * j + lane;
      if (first + at / vectors < all) {
        to[at] = from[at];
      }
    }
    return;
  }
  y += uint64_t(row) * p.K + 16 * piece;
  UNROLL
  for (uint32_t j = 0; j < 16; ++j) {
    if (i < all && 16 * piece + j < p.K) {
      y[j] = narrow<T>(values[j]);
    }
  }
}
