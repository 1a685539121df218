// What kernels of a step are told, structs for host and device. The first is
// read from memory: all launches of a token share one.
#pragma once
#ifndef __CUDACC_RTC__
#include <cstdint>
#endif

constexpr uint32_t most_pairs = 128;   // that a head may turn
constexpr uint32_t most_taps = 4;      // of a delta rule's convolution
constexpr uint32_t most_experts = 512; // of a mixture
constexpr uint32_t most_used = 32;     // by a token

// Threads of blocks, and of a block's row or warps of rows.
constexpr uint32_t delta_lanes = 8; // that share a row of a state
constexpr uint32_t delta_threads = 128;
constexpr uint32_t route_warps = 8; // a row of the router each
constexpr uint32_t combine_threads = 64;

struct AttendParams {
  uint32_t position; // of the token
  uint32_t capacity; // rows of keys and values a head has memory for
  uint32_t split;    // of these rows, by one block
  uint32_t blocks;   // that rows are split among
  uint32_t group;    // heads of queries for one of keys
  uint32_t pairs;
  uint32_t traditional;
  uint32_t gated; // a head's gate lies after its q
  uint32_t turn;  // of a step: which windows delta rules read, 0 or 1
  float eps;
  float scale; // of scores, times log2(e)
  float cosines[most_pairs];
  float sines[most_pairs];
};

// What all mixtures of experts of a model have in common.
struct RouteParams {
  uint32_t hidden;
  uint32_t experts;
  uint32_t rows; // of the router: one more where there is a shared expert
  uint32_t used;
  uint32_t normalised;
};

// What all delta rules of a model have in common.
struct DeltaStepParams {
  uint32_t hidden;
  uint32_t key_heads;
  uint32_t tiled; // head h has key head h % key_heads
  uint32_t taps;
  float eps;
};
