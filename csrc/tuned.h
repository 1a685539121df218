// Plans that measuring found for this machine, in the place of the rules' own.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "formats.h"
#include "plan.h"

namespace mlx_gguf {

enum class Backend { cpu, metal };

std::string to_string(Backend backend);

// The backend of a name, or std::invalid_argument.
Backend backend_named(std::string_view name);

// A product whose plans can be stored; of any number of rows of x. Tuning
// changes a kernel's parameters, never the kernel or its direction.
struct Problem {
  Backend backend;
  Kernel kernel;
  bool transpose;
  uint32_t format; // its id
  mlx::core::Dtype::Val x;
  int64_t N;
  int64_t K;

  auto operator<=>(const Problem&) const = default;
};

// Plans by the number of rows of x they serve, as rows_class() has it.
using PlansByRows = std::map<int, Plan>;

// Rows of x that share a plan: M rounded up to a power of two, at most 1024.
int rows_class(int64_t M);

// The stored plan, if any. Any thread; costs one load while nothing is stored.
std::optional<Plan> tuned(const Problem& problem, int64_t M);

// The stored plan for what `chosen` would do, else `chosen`.
Plan tuned_or(
    const Plan& chosen,
    Backend backend,
    const Format& format,
    mlx::core::Dtype x,
    int64_t M,
    int64_t N,
    int64_t K);

// Stores plans in the place of earlier ones for the problem. All must be of its
// kernel and direction. A gemv needs plans for 1, 2, 4 and 8 rows that sum in
// the same order: otherwise a row would depend on its batch.
// std::invalid_argument and no change if not.
void set_tuned(const Problem& problem, PlansByRows plans);

void clear_tuned();

std::vector<std::pair<Problem, PlansByRows>> list_tuned();

// The one of `candidates` that to_string() prints so, or std::invalid_argument
// that names `owner`: whose candidates they are.
Plan plan_from_string(
    std::string_view text,
    std::span<const Plan> candidates,
    const std::string& owner);

} // namespace mlx_gguf
