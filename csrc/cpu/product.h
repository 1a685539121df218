// Products of many rows with few packed matrices: what quantized_matmul and
// gather_qmm have in common.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/kernels.h"
#include "formats.h"

namespace mlx_gguf::cpu {

// One row of a product: y = alpha * x @ W.T + beta * c, or x @ W.
struct Row {
  int64_t x; // index of the row of x
  void* y;
  const void* c; // nullptr for none
};

// Rows that meet the same packed matrix.
struct Group {
  const uint8_t* w;
  std::vector<Row> rows;
};

class Activations;

struct Product {
  const Format* format;
  Number number; // of x, y and c
  bool transpose;
  float alpha;
  float beta;
  int64_t N;     // rows of W
  int64_t K;     // weights in a row of W
  bool c_scalar; // c has one value for a whole row

  // x: row-major, its rows K long (N when not transposed).
  void run(
      const void* x, int64_t x_rows, const std::vector<Group>& groups) const;

 private:
  // x @ W.T and x @ W.
  void run_rows(
      const Activations& x,
      const TypeKernels& type,
      const std::vector<Group>& groups) const;
  void run_columns(
      const Activations& x,
      const TypeKernels& type,
      const std::vector<Group>& groups) const;

  // Of w, when transposed: the plan's.
  int64_t rows_per_task(const std::vector<Group>& groups) const;
};

} // namespace mlx_gguf::cpu
