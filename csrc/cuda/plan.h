// Which CUDA kernel a problem gets: data and rules, no CUDA.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../formats.h"

namespace mlx_gguf::cuda {

enum class Kernel {
  gemv_tma,   // 1 to 8 rows of x; compute capability 9.0
  gemv,       // the same without its copy engine
  gemv_block, // any type in f32 arithmetic
  prepare,    // x as gemm wants it
  gemm,
  gather_gemm, // gemm over rows sorted by expert
  gemm_block,  // any type, both ways round, in f32 arithmetic
  gather_gemm_block,
  dequantize,
  dense, // dequantize to x's dtype, then MLX's own matmul
};

struct Plan {
  Kernel kernel = Kernel::gemv;
  bool transpose = true; // gemm_block: x W^T, not x W
  int copy = 1;          // gemv_tma: units of 256 weights a copy
  int interleave = 1;    // and rows of w whose bytes are a multiple of 16
  int cluster = 1;       // blocks that share rows and split K
  int ranks = 1;         // gemv_tma: parts of K, of them or a block's warps
  int groups = 1;        // of warps, each with a tile of 16 rows of w at a time
  int turns = 1;         // warps of a group, which take turns along K
  int stages = 2;        // of a warp's ring
  int tiles = 1;         // gemv: of 8 columns of x, as it is compiled for
  bool whole = false;    // gemv_tma: in whole numbers
  int most = 8;          // gemv_tma: rows of x that it is compiled for

  bool operator==(const Plan&) const = default;
};

std::string to_string(Kernel kernel);
std::string to_string(const Plan& plan);

struct Gpu {
  int major = 9;
  int minor = 0;
  int processors = 132;
  int shared_bytes = 227 * 1024; // a block may have
  bool dense = true; // large products of many rows may round w to x's dtype
};

constexpr int few_rows = 8; // of x, which a gemv takes

// y = x W^T (or x W): M rows of x for every one of `batch` entries, all at
// least 1. `aligned`: w starts at a multiple of 16 bytes. For M of 1 to 8 the
// plans of otherwise equal problems sum in the same order.
Plan choose(
    const Format& format,
    mlx::core::Dtype x,
    int64_t M,
    int64_t N,
    int64_t K,
    int64_t batch,
    bool transpose,
    bool aligned,
    const Gpu& gpu);

// The same for `pairs` products of M rows, each with one of the matrices;
// `sorted`: the matrices' indices ascend.
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
    bool aligned,
    const Gpu& gpu);

// What both come to for up to few_rows rows.
Plan gemv_plan(
    const Format& format,
    mlx::core::Dtype x,
    int64_t M,
    int64_t N,
    int64_t K,
    int64_t batch,
    bool aligned,
    const Gpu& gpu);

// Sizes that host and kernels agree on.

// Columns of B that a row of x takes: the parts of an f32.
int parts_of(mlx::core::Dtype x);
// Bytes of a column of a prepared unit of x, cuda/tc/columns.h.
int column_bytes(const Format& format);
// Bytes of 256 weights of a row.
int unit_bytes(const Format& format);
// Whether the tensor cores' kernels take the type.
bool has_units(const Format& format);

// A launch of gemv_tma: cuda/gemv_tma.h has the order of its shared memory.
struct TmaLaunch {
  int64_t rows;  // of w a cluster has
  int64_t split; // of them, shared out between warps at a time
  int64_t held;  // units of a rank
  int64_t clusters;
  int64_t shared_bytes;
  int box_bytes; // of a row in one copy
};
TmaLaunch tma_launch(
    const Plan& plan,
    const Format& format,
    int64_t M,
    int64_t N,
    int64_t K,
    int64_t batch,
    const Gpu& gpu);

// A launch of gemv: units of x a block holds at once, and all its memory.
struct GemvLaunch {
  int64_t held;
  int64_t shared_bytes;
};
GemvLaunch gemv_launch(
    const Plan& plan,
    const Format& format,
    mlx::core::Dtype x,
    int64_t M,
    int64_t K,
    const Gpu& gpu);

// Of gemm: rows of x in a tile, and shared memory.
int gemm_rows(mlx::core::Dtype x);
int64_t gemm_shared_bytes(const Format& format);

// One row for each kernel that choose() can come to.
struct ListedKernel {
  std::string name;
  std::string function;   // its C++ name: what the compiler is asked for
  int least_architecture; // 80 or 90
};
std::vector<ListedKernel> cuda_kernels();

} // namespace mlx_gguf::cuda
