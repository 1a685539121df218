// The plans of kernels: which there are, which a product gets, and storing
// others for it. What `mlx-gguf tune` and `mlx-gguf doctor` stand on.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "bindings/bindings.h"
#include "cpu/plan.h"
#include "cpu/threads.h"
#include "cuda/backend.h"
#include "metal/names.h"
#include "metal/plan.h"
#include "tuned.h"
#ifdef MLX_GGUF_METAL
#include "metal/eval.h"
#endif

namespace nb = nanobind;
using namespace nb::literals;

namespace mlx_gguf {

namespace {

using mlx::core::Dtype;

constexpr const char* op = "tuned";

Dtype dtype_named(const std::string& name) {
  for (auto [known, dtype] :
       {std::pair{"float16", mlx::core::float16},
        std::pair{"bfloat16", mlx::core::bfloat16},
        std::pair{"float32", mlx::core::float32}}) {
    if (name == known) {
      return dtype;
    }
  }
  throw std::invalid_argument(
      "[tuned] Expected a dtype of float16, bfloat16 or float32. Received '" +
      name + "'.");
}

const char* name_of(Dtype::Val dtype) {
  return dtype == Dtype::Val::float16    ? "float16"
         : dtype == Dtype::Val::bfloat16 ? "bfloat16"
                                         : "float32";
}

std::vector<std::string> backends() {
  std::vector<std::string> out{"cpu"};
#ifdef MLX_GGUF_METAL
  if (metal::is_available()) {
    out.push_back("metal");
  }
#endif
  if (cuda::loaded()) {
    out.push_back("cuda");
  }
  return out;
}

std::vector<Plan> candidates(Backend backend, const Format& format) {
  return backend == Backend::cpu ? cpu::candidates()
                                 : metal::candidates(format);
}

Plan choose(
    Backend backend,
    [[maybe_unused]] const Format& format,
    [[maybe_unused]] Dtype x,
    [[maybe_unused]] int64_t M,
    [[maybe_unused]] int64_t N,
    [[maybe_unused]] int64_t K) {
  if (backend == Backend::cpu) {
    return cpu::choose(N, cpu::num_threads());
  }
#ifdef MLX_GGUF_METAL
  if (metal::is_available()) {
    return metal::choose(format, x, M, N, K, true, metal::gpu());
  }
#endif
  throw std::runtime_error(
      "[plan_for] Expected a backend of this machine. Received metal.");
}

Plan plan_for(
    const std::string& backend_name,
    const std::string& qtype,
    const std::string& dtype,
    int64_t M,
    int64_t N,
    int64_t K,
    bool use_tuned) {
  Backend backend = backend_named(backend_name);
  const Format& format = supported_format("plan_for", qtype);
  Dtype x = dtype_named(dtype);
  if (M < 1 || N < 1 || K < 1) {
    throw std::invalid_argument(
        "[plan_for] Expected M, N and K of at least 1. Received " +
        std::to_string(M) + ", " + std::to_string(N) + " and " +
        std::to_string(K) + ".");
  }
  Plan plan = choose(backend, format, x, M, N, K);
  return use_tuned ? tuned_or(plan, backend, format, x, M, N, K) : plan;
}

void set_plans(
    const std::string& backend_name,
    const std::string& qtype,
    const std::string& dtype,
    int64_t N,
    int64_t K,
    const std::map<int, std::string>& plans) {
  Backend backend = backend_named(backend_name);
  const Format& format = supported_format(op, qtype);
  std::vector<Plan> allowed = candidates(backend, format);
  PlansByRows by_rows;
  for (const auto& [rows, text] : plans) {
    by_rows[rows] = plan_from_string(
        text, allowed, backend_name + " for " + std::string(format.name));
  }
  // Which kernel the plans are for they say themselves.
  Plan first = by_rows.empty() ? Plan{} : by_rows.begin()->second;
  Problem problem{
      backend,
      first.kernel,
      first.transpose,
      format.id,
      dtype_named(dtype).val(),
      N,
      K};
  set_tuned(problem, std::move(by_rows));
}

nb::list stored_plans() {
  nb::list out;
  for (const auto& [problem, plans] : list_tuned()) {
    nb::dict texts;
    for (const auto& [rows, plan] : plans) {
      texts[nb::int_(rows)] = to_string(plan);
    }
    nb::dict row;
    row["backend"] = to_string(problem.backend);
    row["qtype"] = find_format(problem.format)->name;
    row["dtype"] = name_of(problem.x);
    row["N"] = problem.N;
    row["K"] = problem.K;
    row["plans"] = texts;
    out.append(row);
  }
  return out;
}

std::vector<std::string> metal_kernels() {
  std::vector<std::string> out;
  for (auto& kernel : metal::metal_kernels()) {
    out.push_back(std::move(kernel.name));
  }
  return out;
}

std::string metal_kernel_name(
    const Plan& plan, const std::string& qtype, const std::string& dtype) {
  return metal::kernel_name(
      plan, supported_format("metal_kernel_name", qtype), dtype_named(dtype));
}

} // namespace

void bind_plans(nb::module_& m) {
  nb::class_<Plan>(m, "Plan", R"(
A kernel choice; ``str(plan)`` is its name in files.

Attributes
----------
kernel : str
    ``"gemv"``, ``"gemm"``, ``"gather_gemm"``, ``"dequantize"`` or ``"matmul"``.
rows : int
    Of a gemv: weight rows taken together; by a simdgroup, or a CPU's task.
columns : int
    Of a gemv on a GPU: rows of x that one read of the weights serves.
transpose : bool
    Whether for ``x @ W.T`` rather than ``x @ W``.
)")
      .def_prop_ro("kernel", [](const Plan& p) { return to_string(p.kernel); })
      .def_ro("rows", &Plan::rows)
      .def_ro("columns", &Plan::columns)
      .def_ro("transpose", &Plan::transpose)
      .def(
          "same_order",
          &same_order,
          "other"_a,
          "Whether both sum a row's products in the same order.")
      .def(
          "__eq__",
          [](const Plan& a, const Plan& b) { return a == b; },
          nb::is_operator(),
          nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__str__", [](const Plan& p) { return to_string(p); })
      .def("__repr__", [](const Plan& p) {
        return "Plan(" + to_string(p) + ")";
      });

  m.def("backends", &backends, "Names of the backends that can run here.");
  m.def(
      "plan_candidates",
      [](const std::string& backend, const std::string& qtype) {
        return candidates(backend_named(backend), supported_format(op, qtype));
      },
      "backend"_a,
      "qtype"_a,
      "Every plan that a tensor type can have on a backend.");
  m.def(
      "plan_for",
      &plan_for,
      "backend"_a,
      "qtype"_a,
      "dtype"_a,
      "M"_a,
      "N"_a,
      "K"_a,
      "tuned"_a = true,
      "The plan of ``x @ W.T``, x ``[M, K]`` of a dtype's name and W ``[N, "
      "K]``; "
      "without ``tuned``, what it is when none is stored.");
  m.def(
      "set_plans",
      &set_plans,
      "backend"_a,
      "qtype"_a,
      "dtype"_a,
      "N"_a,
      "K"_a,
      "plans"_a,
      R"(
Store plans for the products with an ``[N, K]`` matrix, for this process.

Parameters
----------
backend, qtype, dtype : str
    Names, such as ``"cpu"``, ``"q4_k"`` and ``"float16"``.
N, K : int
plans : dict of int to str
    Plans by the rows of x they serve, a power of two of at most 1024; fewer
    rows are rounded up to it. A gemv needs those of 1, 2, 4 and 8.

Raises
------
ValueError
    A plan that the backend does not have for the type, plans of several
    kernels, or of a gemv whose sums differ in order.
)");
  m.def("clear_plans", &clear_tuned, "Forget all stored plans.");
  m.def(
      "stored_plans",
      &stored_plans,
      nb::sig("def stored_plans() -> list[dict]"),
      "The stored plans as arguments of set_plans().");
  m.def(
      "metal_kernels",
      &metal_kernels,
      "Names of all Metal kernels, whether or not Metal is here.");
  m.def(
      "metal_kernel_name",
      &metal_kernel_name,
      "plan"_a,
      "qtype"_a,
      "dtype"_a,
      "The Metal kernel of a plan.");
}

} // namespace mlx_gguf
