// The arguments of every kernel, one struct for host and device.
#pragma once
#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// y = alpha * (x times w) + beta * c, where w is N rows of K weights. Steps are
// from one matrix of a batch to the next, 0 where all share it.
struct Params {
  uint32_t M; // rows of x, c and y; rows to write for dequantize
  uint32_t N;
  uint32_t K;
  uint32_t gather; // 1: lhs and rhs choose the x and w of a batch entry
  uint32_t has_c;
  float alpha;
  float beta;
  uint32_t unused; // the 64-bit members lie alike in every language
  uint64_t x_step; // in elements
  uint64_t w_step; // in bytes
  uint64_t c_step; // in elements
  uint64_t y_step; // in elements
};
