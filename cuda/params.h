// The arguments of every kernel, one struct for host and device.
#pragma once
#ifndef __CUDACC_RTC__
#include <cstdint>
#endif

// y = alpha * (x times w) + beta * c, where w is N rows of K weights. Steps are
// from one matrix of a batch to the next, 0 where all share it.
struct Params {
  uint32_t M; // rows of x, c and y; rows to write for dequantize
  uint32_t N;
  uint32_t K;
  uint32_t gather; // lhs and rhs choose the x and w of 1: an entry, 2: a row
  uint32_t has_c;
  float alpha;
  float beta;
  uint32_t tiles;   // of 16 rows of w that a block of a gemv has
  uint32_t held;    // units of 256 weights whose x a block holds at once
  uint32_t columns; // columns of x a block holds: rows of x times their parts
  // gemv_tma alone but for the inverse.
  uint32_t rows;    // of w that a cluster has, a multiple of split
  uint32_t split;   // rows whose work is split between warps at a time
  uint32_t ranks;   // parts of K, each of `held` units
  uint32_t stages;  // of a warp's ring
  uint32_t inverse; // 2^31 / M, rounded up
  // Of the matrices that lhs and rhs choose from: an index past it is taken for
  // it, so that nothing but a wrong product comes of one.
  uint32_t last_x;
  uint32_t last_w;
  uint32_t early;  // gemv_tma: it may run while the kernel before it makes x
  uint64_t x_step; // in elements
  uint64_t w_step; // in bytes
  uint64_t c_step; // in elements
  uint64_t y_step; // in elements
};
