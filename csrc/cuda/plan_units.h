// What plans know of types, and what the files of plans share.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "cuda/plan.h"

namespace mlx_gguf::cuda {

// When gemv_tma multiplies in whole numbers, whose x takes more memory. The
// other way is much slower for tables.
enum class Whole { never, with_room, always };

// What the kernels' structs of a type say.
struct UnitRow {
  std::string_view type;
  int summed; // weights that share a min, 0 where there is none
  Whole whole = Whole::never;
  bool paired = false; // one row of x takes groups in pairs: cuda/tc/pairs.h
};
inline constexpr std::array unit_rows{
    UnitRow{"q4_0", 0},
    UnitRow{"q4_1", 32},
    UnitRow{"q5_0", 0},
    UnitRow{"q5_1", 32},
    UnitRow{"q8_0", 0, Whole::with_room},
    UnitRow{"q2_k", 16},
    UnitRow{"q3_k", 0},
    UnitRow{"q4_k", 32, Whole::with_room, true},
    UnitRow{"q5_k", 32, Whole::with_room},
    UnitRow{"q6_k", 0, Whole::with_room, true},
    UnitRow{"iq4_nl", 0},
    UnitRow{"iq4_xs", 0, Whole::always, true},
    UnitRow{"mxfp4", 0},
};

// nullptr for types without units.
inline const UnitRow* unit_row(const Format& format) {
  for (const UnitRow& row : unit_rows) {
    if (row.type == format.name) {
      return &row;
    }
  }
  return nullptr;
}

inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

inline int64_t units_of(int64_t K) {
  return ceil_div(K, 256);
}

// Makes a plan for gemv_tma; false where the copy engine cannot take w or
// shared memory not enough of x.
bool plan_tma(
    Plan& plan,
    const Format& format,
    int64_t M,
    int64_t N,
    int64_t K,
    int64_t batch,
    const Gpu& gpu);

// Plans of all its kernels for a type that has units.
std::vector<Plan> tma_plans(const Format& format, mlx::core::Dtype x);

} // namespace mlx_gguf::cuda
