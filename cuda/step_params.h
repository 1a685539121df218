// What the attention of a step is told, one struct for host and device, which
// reads it from memory: all launches of a token share one.
#pragma once
#ifndef __CUDACC_RTC__
#include <cstdint>
#endif

constexpr uint32_t most_pairs = 128; // that a head may turn

struct AttendParams {
  uint32_t position; // of the token
  uint32_t capacity; // rows of keys and values a head has memory for
  uint32_t split;    // of these rows, by one block
  uint32_t blocks;   // that rows are split among
  uint32_t group;    // heads of queries for one of keys
  uint32_t pairs;
  uint32_t traditional;
  float eps;
  float scale; // of scores, times log2(e)
  float cosines[most_pairs];
  float sines[most_pairs];
};
