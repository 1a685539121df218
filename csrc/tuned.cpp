#include "tuned.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>

namespace mlx_gguf {

namespace {

constexpr int most_rows = 1024;
constexpr std::array gemv_rows{1, 2, 4, 8};
constexpr std::array backend_names{"cpu", "metal"}; // in the enum's order

// Never destroyed: streams may still run while statics die.
struct Table {
  std::shared_mutex mutex;
  std::map<Problem, PlansByRows> plans;
  std::atomic<bool> used{false};
};

Table& table() {
  static Table& made = *new Table;
  return made;
}

[[noreturn]] void refuse(const std::string& expected, const std::string& got) {
  throw std::invalid_argument(
      "[tuned] Expected " + expected + ". Received " + got + ".");
}

void check(const Problem& problem, const PlansByRows& plans) {
  if (plans.empty()) {
    refuse("at least one plan", "none");
  }
  for (const auto& [rows, plan] : plans) {
    if (rows < 1 || rows_class(rows) != rows) {
      refuse(
          "plans by rows of x, a power of two of at most 1024",
          std::to_string(rows));
    }
    if (plan.kernel != problem.kernel || plan.transpose != problem.transpose) {
      refuse(
          "plans of one kernel and direction, as '" +
              to_string(plans.begin()->second) + "'",
          "'" + to_string(plan) + "'");
    }
  }
  if (problem.kernel != Kernel::gemv) {
    return;
  }
  for (int rows : gemv_rows) {
    if (!plans.contains(rows)) {
      refuse(
          "plans of a gemv for 1, 2, 4 and 8 rows of x",
          "none for " + std::to_string(rows));
    }
  }
  const Plan& first = plans.begin()->second;
  for (const auto& [rows, plan] : plans) {
    if (!same_order(first, plan)) {
      refuse(
          "plans that sum a row in the same order for every batch, as '" +
              to_string(first) + "'",
          "'" + to_string(plan) + "' for " + std::to_string(rows) +
              " rows of x");
    }
  }
}

} // namespace

std::string to_string(Backend backend) {
  return backend_names[static_cast<size_t>(backend)];
}

Backend backend_named(std::string_view name) {
  for (size_t i = 0; i < backend_names.size(); ++i) {
    if (name == backend_names[i]) {
      return static_cast<Backend>(i);
    }
  }
  refuse("a backend of cpu or metal", "'" + std::string(name) + "'");
}

int rows_class(int64_t M) {
  int64_t rows = std::clamp<int64_t>(M, 1, most_rows);
  return static_cast<int>(std::bit_ceil(static_cast<uint64_t>(rows)));
}

std::optional<Plan> tuned(const Problem& problem, int64_t M) {
  Table& t = table();
  if (!t.used.load(std::memory_order_acquire)) {
    return std::nullopt;
  }
  std::shared_lock lock(t.mutex);
  auto entry = t.plans.find(problem);
  if (entry == t.plans.end()) {
    return std::nullopt;
  }
  auto plan = entry->second.find(rows_class(M));
  return plan == entry->second.end() ? std::nullopt
                                     : std::optional(plan->second);
}

Plan tuned_or(
    const Plan& chosen,
    Backend backend,
    const Format& format,
    mlx::core::Dtype x,
    int64_t M,
    int64_t N,
    int64_t K) {
  Problem problem{
      backend, chosen.kernel, chosen.transpose, format.id, x.val(), N, K};
  return tuned(problem, M).value_or(chosen);
}

void set_tuned(const Problem& problem, PlansByRows plans) {
  check(problem, plans);
  Table& t = table();
  std::unique_lock lock(t.mutex);
  t.plans[problem] = std::move(plans);
  t.used.store(true, std::memory_order_release);
}

void clear_tuned() {
  Table& t = table();
  std::unique_lock lock(t.mutex);
  t.plans.clear();
  t.used.store(false, std::memory_order_release);
}

std::vector<std::pair<Problem, PlansByRows>> list_tuned() {
  Table& t = table();
  std::shared_lock lock(t.mutex);
  return {t.plans.begin(), t.plans.end()};
}

Plan plan_from_string(
    std::string_view text,
    std::span<const Plan> candidates,
    const std::string& owner) {
  for (const Plan& plan : candidates) {
    if (to_string(plan) == text) {
      return plan;
    }
  }
  refuse("a plan of " + owner, "'" + std::string(text) + "'");
}

} // namespace mlx_gguf
