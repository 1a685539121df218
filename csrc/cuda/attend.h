// Which models there are step kernels for, and which attention kernel their
// heads get: cuda/attend.h's template arguments.
#pragma once

#include <algorithm>

#include "../../cuda/step_params.h"
#include "../step.h"

namespace mlx_gguf::cuda {

struct AttendPlan {
  int heads; // of queries that a block takes; 0: no kernel takes such heads
  int lanes; // that share a key
};

constexpr int attend_warps = 8;

// For caches with room for so many rows.
inline AttendPlan attend_plan(const Sizes& s, int rows) {
  int D = s.head_dim, group = s.heads / s.kv_heads;
  if (D % 16 != 0 || D > 2 * static_cast<int>(most_pairs)) {
    return {0, 0};
  }
  // Few rows are sooner read by many blocks at once than once for all heads.
  constexpr int few_rows = 1024;
  // A block holds so many numbers of its heads in shared memory, and a lane in
  // registers.
  constexpr int most_shared = 1024, most_numbers = 64;
  int heads = rows <= few_rows ? 1 : std::min(group, most_shared / D);
  for (;; --heads) {
    for (int lanes = 8; group % heads == 0 && lanes <= 32; lanes *= 2) {
      if (D % (2 * lanes) == 0 && heads * (D / lanes) <= most_numbers) {
        return {heads, lanes};
      }
    }
  }
}

// Whether there are kernels for a model's steps. A delta rule's block has a
// head, and its threads each row of the state.
inline bool takes_steps(const Sizes& s) {
  bool delta = s.delta.heads == 0 ||
               (s.delta.head_dim <= static_cast<int>(1024 / delta_lanes) &&
                s.delta.taps <= static_cast<int>(most_taps));
  return attend_plan(s, 1).heads > 0 && delta &&
         s.experts.count <= static_cast<int>(most_experts) &&
         s.experts.used <= static_cast<int>(most_used);
}

// Rows of the caches that a block takes, and blocks among which they are split:
// that costs about as much as going through 256 rows.
struct AttendSplit {
  int rows;
  int blocks;
};

inline AttendSplit attend_split(int rows, int most_blocks) {
  constexpr int enough = 256;
  int blocks = std::clamp((rows + enough - 1) / enough, 1, most_blocks);
  int each = (rows + blocks - 1) / blocks;
  return {each, (rows + each - 1) / each};
}

} // namespace mlx_gguf::cuda
