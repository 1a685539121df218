// What may vary of a product on the CPU: how many rows of w a task takes.
#pragma once

#include <array>
#include <vector>

// "plan.h" alone would be this file.
#include "../plan.h"
#include "cpu/kernels.h"

namespace mlx_gguf::cpu {

// Few rows share the work evenly, many cost less to hand out. All multiples of
// row_group: results are equal to the bit.
inline constexpr std::array task_rows{4, 8, 16, 32, 64, 128};
inline constexpr int default_task_rows = 16;
inline constexpr int many_task_rows = 64; // where there are many rows to share
inline constexpr int64_t many_rows = 8192;

inline Plan plan_of(int rows) {
  return Plan{.kernel = Kernel::gemv, .rows = rows};
}

// For x @ W.T with any number of rows of x.
inline Plan choose(int64_t N) {
  return plan_of(N >= many_rows ? many_task_rows : default_task_rows);
}

inline std::vector<Plan> candidates() {
  std::vector<Plan> out;
  for (int rows : task_rows) {
    out.push_back(plan_of(rows));
  }
  return out;
}

} // namespace mlx_gguf::cpu
