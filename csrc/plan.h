// A kernel choice as a value: compared, printed, listed, tuned and stored.
#pragma once

#include <string>

namespace mlx_gguf {

enum class Kernel {
  gemv,        // 1 to `columns` rows of x
  gemm,        // tiles of x times tiles of w
  gather_gemm, // gemm over rows sorted by expert
  dequantize,  // w as numbers; also the rows of an embedding
  matmul,      // dequantize to f32, then MLX's own matmul
  half_test,   // whether the device keeps fp16 subnormals
};

// How a gemv reads its weights.
enum class Form {
  block,     // the generic decode
  shift,     // integer codes masked in place and converted
  subnormal, // codes read as fp16 subnormals, no convert
  magic,     // codes under the exponent of 1024
  wide,      // subnormal, with twice the weights of a block a lane
  table,     // codes that index a table
};

struct Plan {
  Kernel kernel = Kernel::gemv;
  Form form = Form::block;
  int rows = 1;         // of w a simdgroup (CUDA: warp) works on at once
  int columns = 1;      // rows of x that one read of w serves
  int simdgroups = 1;   // in a threadgroup
  bool split_k = false; // they share rows of w and split K
  int tile_m = 0;       // gemm: rows of x and columns of y in a tile
  int tile_n = 0;
  bool transpose = true; // x W^T, not x W

  bool operator==(const Plan&) const = default;
};

inline const char* to_string(Kernel kernel) {
  constexpr const char* names[] = {
      "gemv", "gemm", "gather_gemm", "dequantize", "matmul", "half_test"};
  return names[static_cast<int>(kernel)];
}

inline const char* to_string(Form form) {
  constexpr const char* names[] = {
      "block", "shift", "subnormal", "magic", "wide", "table"};
  return names[static_cast<int>(form)];
}

inline std::string to_string(const Plan& plan) {
  std::string out = to_string(plan.kernel);
  if (plan.kernel == Kernel::gemv) {
    out += std::string(" form=") + to_string(plan.form) +
           " rows=" + std::to_string(plan.rows) +
           " columns=" + std::to_string(plan.columns) +
           " simdgroups=" + std::to_string(plan.simdgroups) +
           " split_k=" + (plan.split_k ? "1" : "0");
  } else if (
      plan.kernel == Kernel::gemm || plan.kernel == Kernel::gather_gemm) {
    out += " tile=" + std::to_string(plan.tile_m) + "x" +
           std::to_string(plan.tile_n) +
           " transpose=" + (plan.transpose ? "1" : "0");
  }
  return out;
}

// Whether both plans sum a row's products in the same order, so that a row of a
// batch equals its solo run bit for bit.
inline bool same_order(const Plan& a, const Plan& b) {
  return a.kernel == Kernel::gemv && b.kernel == Kernel::gemv &&
         a.form == b.form && a.split_k == b.split_k &&
         (!a.split_k || a.simdgroups == b.simdgroups);
}

} // namespace mlx_gguf
