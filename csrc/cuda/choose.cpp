#include <algorithm>

#include "cuda/plan.h"

namespace mlx_gguf::cuda {

namespace {

using mlx::core::Dtype;

// Rows of x from which writing w out in x's dtype and MLX's matmul beat
// decoding tiles of w for every 64 rows: measured on an H200.
constexpr int64_t dense_rows = 256;
// Fewer weights are not worth a second launch; more take too much memory, which
// is kept: 256 MB.
constexpr int64_t least_dense = int64_t{1} << 20;
constexpr int64_t most_dense = int64_t{1} << 27;

bool is_dense(
    const Format& format,
    Dtype x,
    int64_t M,
    int64_t weights,
    int64_t batch,
    const Gpu& gpu) {
  // MLX multiplies f32 as tf32, with 10 bits of 23.
  return gpu.dense && format.packed() && parts_of(x) == 1 && batch == 1 &&
         M >= dense_rows && weights >= least_dense && weights <= most_dense;
}

Plan gemm_plan(
    const Format& format, bool transpose, bool gather, const Gpu& gpu) {
  if (has_units(format) && transpose &&
      gemm_shared_bytes(format) <= gpu.shared_bytes) {
    return Plan{.kernel = gather ? Kernel::gather_gemm : Kernel::gemm};
  }
  return Plan{
      .kernel = gather ? Kernel::gather_gemm_block : Kernel::gemm_block,
      .transpose = transpose};
}

} // namespace

std::string to_string(Kernel kernel) {
  constexpr const char* names[] = {
      "gemv_tma",
      "gemv",
      "gemv_block",
      "prepare",
      "gemm",
      "gather_gemm",
      "gemm_block",
      "gather_gemm_block",
      "dequantize",
      "dense"};
  return names[static_cast<int>(kernel)];
}

std::string to_string(const Plan& plan) {
  std::string out = to_string(plan.kernel);
  auto add = [&](const char* name, int value) {
    out += std::string(" ") + name + "=" + std::to_string(value);
  };
  if (plan.kernel == Kernel::gemv_tma || plan.kernel == Kernel::gemv) {
    add("copy", plan.copy);
    add("interleave", plan.interleave);
    add("cluster", plan.cluster);
    add("groups", plan.groups);
    add("turns", plan.turns);
    add("stages", plan.stages);
    add("ranks", plan.ranks);
  }
  if (plan.kernel == Kernel::gemv) {
    add("tiles", plan.tiles);
  }
  if (plan.kernel == Kernel::gemv_tma) {
    add("whole", plan.whole);
    add("most", plan.most);
  }
  if (!plan.transpose) {
    add("transpose", 0);
  }
  return out;
}

Plan choose(
    const Format& format,
    Dtype x,
    int64_t M,
    int64_t N,
    int64_t K,
    int64_t batch,
    bool transpose,
    bool aligned,
    const Gpu& gpu) {
  if (transpose && M <= few_rows) {
    return gemv_plan(format, x, M, N, K, batch, aligned, gpu);
  }
  if (is_dense(format, x, M, N * K, batch, gpu)) {
    return Plan{.kernel = Kernel::dense, .transpose = transpose};
  }
  return gemm_plan(format, transpose, false, gpu);
}

Plan choose_gather(
    const Format& format,
    Dtype x,
    int64_t M,
    int64_t N,
    int64_t K,
    int64_t pairs,
    int64_t experts,
    bool sorted,
    bool transpose,
    bool aligned,
    const Gpu& gpu) {
  // A tile of sorted rows pays where an expert has several of them.
  int64_t rows = pairs / std::max<int64_t>(experts, 1);
  if (sorted && M == 1 && (rows >= 4 || !transpose)) {
    return gemm_plan(format, transpose, true, gpu);
  }
  if (transpose && M <= few_rows) {
    return gemv_plan(format, x, M, N, K, pairs, aligned, gpu);
  }
  return gemm_plan(format, transpose, false, gpu);
}

} // namespace mlx_gguf::cuda
