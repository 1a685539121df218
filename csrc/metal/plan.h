// Which kernel a problem gets on a GPU: data and rules, no Metal.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "../formats.h"
#include "../plan.h"

namespace mlx_gguf::metal {

struct Gpu {
  int generation = 13; // of the architecture: 13 is M1, 14 M2, ... 17 M5
  int cores = 8;       // roughly, from the size of the chip
  bool half_subnormals = false; // what half_test found
};

// From Metal's architecture name, such as "applegpu_g13g". An unknown one is
// taken for the smallest chip.
Gpu gpu_from_architecture(std::string_view name, bool half_subnormals);

// y = x W^T (or x W) with x [M, transpose ? K : N] for every batch entry, M, N
// and K at least 1. For M of 1 to 8 the plans of one (format, x, N, K, gpu)
// sum in the same order.
Plan choose(
    const Format& format,
    mlx::core::Dtype x,
    int64_t M,
    int64_t N,
    int64_t K,
    bool transpose,
    const Gpu& gpu);

// The same for `pairs` products of M rows each, every one with one of
// `experts` matrices. `sorted`: the matrices' indices ascend.
Plan choose_gather(
    const Format& format,
    mlx::core::Dtype x,
    int64_t M,
    int64_t N,
    int64_t K,
    int64_t pairs,
    int64_t experts,
    bool sorted,
    bool transpose,
    const Gpu& gpu);

// Every plan that choose() or tuning can come to for a type, with every number
// of simdgroups.
std::vector<Plan> candidates(const Format& format);

// One row for each name of the grammar.
struct ListedKernel {
  std::string name;
  std::string instantiation;
  Plan plan; // for gemv with 2 simdgroups; 1 and 4 are the same kernel
  const Format* format;
  mlx::core::Dtype x;
};
std::vector<ListedKernel> metal_kernels();

} // namespace mlx_gguf::metal
