// What may vary of a product on the CPU: how many rows of w a task takes.
#pragma once

#include <array>
#include <vector>

// "plan.h" alone would be this file.
#include "../plan.h"
#include "cpu/kernels.h"

namespace mlx_gguf::cpu {

// Few rows share the work evenly; many are read in long runs, which memory is
// faster at. All multiples of row_group: results are equal to the bit.
inline constexpr std::array task_rows{4, 8, 16, 32, 64, 128};

inline Plan plan_of(int rows) {
  return Plan{.kernel = Kernel::gemv, .rows = rows};
}

// For x @ W.T with any number of rows of x: some tasks for every thread.
inline Plan choose(int64_t N, int threads) {
  int rows = task_rows[0];
  for (int more : task_rows) {
    rows = int64_t(more) * 4 * threads <= N ? more : rows;
  }
  return plan_of(rows);
}

inline std::vector<Plan> candidates() {
  std::vector<Plan> out;
  for (int rows : task_rows) {
    out.push_back(plan_of(rows));
  }
  return out;
}

} // namespace mlx_gguf::cpu
