// Loading the CUDA backend, and what its kernels and plans are.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <stdexcept>
#include <string>
#include <tuple>

#include "bindings/bindings.h"
#include "cuda/backend.h"
#include "cuda/names.h"
#include "cuda/plan.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mlx_gguf {

namespace {

mlx::core::Dtype dtype_named(const char* op, const std::string& name) {
  const std::map<std::string, mlx::core::Dtype> known{
      {"float16", mlx::core::float16},
      {"bfloat16", mlx::core::bfloat16},
      {"float32", mlx::core::float32}};
  if (auto it = known.find(name); it != known.end()) {
    return it->second;
  }
  throw std::invalid_argument(
      std::string("[") + op +
      "] Expected a dtype of float16, bfloat16 or float32. Received " + name +
      ".");
}

// What a benchmark needs to launch a gemv by itself, on an H200:
// cuda/params.h's numbers by name.
nb::dict cuda_launch(
    const std::string& qtype,
    const std::string& dtype,
    int64_t M,
    int64_t N,
    int64_t K) {
  const Format& format = supported_format("cuda_launch", qtype);
  mlx::core::Dtype x = dtype_named("cuda_launch", dtype);
  cuda::Gpu gpu;
  cuda::Plan plan = cuda::choose(format, x, M, N, K, 1, true, true, gpu);
  if (plan.kernel != cuda::Kernel::gemv_tma) {
    throw std::invalid_argument(
        "[cuda_launch] Expected a product that gemv_tma takes. Received one "
        "for " +
        to_string(plan) + ".");
  }
  cuda::TmaLaunch l = cuda::tma_launch(plan, format, M, N, K, 1, gpu);
  nb::dict out;
  out["function"] = cuda::function_of(plan, format, x);
  out["plan"] = to_string(plan);
  out["cluster"] = plan.cluster;
  out["grid"] = nb::make_tuple(plan.cluster, l.clusters, 1);
  out["block"] = nb::make_tuple(32, plan.groups, plan.turns);
  out["shared_bytes"] = l.shared_bytes;
  out["box_bytes"] = l.box_bytes;
  out["interleave"] = plan.interleave;
  out["held"] = l.held;
  out["rows"] = l.rows;
  out["split"] = l.split;
  out["ranks"] = plan.ranks;
  out["stages"] = plan.stages;
  return out;
}

// Of the device that the rules know best: what a plan is can be asked anywhere.
std::string cuda_plan_for(
    const std::string& qtype,
    const std::string& dtype,
    int64_t M,
    int64_t N,
    int64_t K,
    bool transpose) {
  if (M < 1 || N < 1 || K < 1) {
    throw std::invalid_argument(
        "[cuda_plan_for] Expected M, N and K of at least 1. Received " +
        std::to_string(M) + ", " + std::to_string(N) + " and " +
        std::to_string(K) + ".");
  }
  const Format& format = supported_format("cuda_plan_for", qtype);
  return to_string(
      cuda::choose(
          format,
          dtype_named("cuda_plan_for", dtype),
          M,
          N,
          K,
          1,
          transpose,
          true,
          cuda::Gpu{}));
}

// (type, dtype of x, M, N, K, experts, transpose) each.
using Products = std::vector<std::tuple<
    std::string,
    std::string,
    int64_t,
    int64_t,
    int64_t,
    int64_t,
    bool>>;

void cuda_compile(
    const Products& products, const std::vector<std::string>& functions) {
  std::vector<cuda::Problem> problems;
  for (const auto& [qtype, dtype, M, N, K, experts, transpose] : products) {
    const Format& format = supported_format("cuda_compile", qtype);
    if (M < 0 || N < 1 || K < 1 || experts < 0) {
      throw std::invalid_argument(
          "[cuda_compile] Expected N and K of at least 1, M and experts of at "
          "least 0. Received N=" +
          std::to_string(N) + ", K=" + std::to_string(K) + ", M=" +
          std::to_string(M) + " and " + std::to_string(experts) + " experts.");
    }
    problems.push_back(
        {&format,
         dtype_named("cuda_compile", dtype),
         M,
         N,
         K,
         experts,
         transpose});
  }
  if (auto* cuda = cuda::loaded()) {
    nb::gil_scoped_release release;
    cuda->compile_ahead(problems, functions);
  }
}

} // namespace

void bind_cuda(nb::module_& m) {
  m.def(
      "load_cuda",
      &cuda::load,
      "path"_a,
      "Load the CUDA backend from its shared object; RuntimeError if it does "
      "not load.");
  m.def(
      "has_cuda",
      [] { return cuda::loaded() != nullptr; },
      "Whether the CUDA backend is loaded.");
  m.def(
      "cuda_info",
      [] {
        std::map<std::string, std::string> out;
        if (auto* cuda = cuda::loaded()) {
          for (auto& [name, text] : cuda->describe()) {
            out[name] = text;
          }
        }
        return out;
      },
      "What the CUDA backend says of its device, driver, compiler and cache; "
      "empty if it is not loaded.");
  m.def(
      "cuda_kernels",
      [] {
        std::vector<std::tuple<std::string, std::string, int>> out;
        for (auto& k : cuda::cuda_kernels()) {
          out.emplace_back(k.name, k.function, k.least_architecture);
        }
        return out;
      },
      "Every CUDA kernel: its name, its C++ function and the least "
      "architecture "
      "(80 or 90) that has it, whether or not CUDA is here.");
  m.def(
      "cuda_compile",
      &cuda_compile,
      "products"_a,
      "functions"_a = std::vector<std::string>{},
      "Make the kernels of products, and others by their C++ names, on many "
      "threads, and wait; without CUDA do nothing. Of each product: the type "
      "and x's dtype by name, M (0: the numbers of "
      "W), N, K, experts (0: none; else M pairs of a row and one of them), and "
      "whether it is ``x @ W.T``.");
  m.def(
      "cuda_delta_function",
      [](const std::string& dtype, int width) {
        return cuda::delta_function(
            dtype_named("cuda_delta_function", dtype), width);
      },
      "dtype"_a,
      "width"_a,
      "The C++ name of the gated delta rule's kernel for numbers of a dtype's "
      "name, so many a head.");
  m.def(
      "cuda_launch",
      &cuda_launch,
      "qtype"_a,
      "dtype"_a,
      "M"_a,
      "N"_a,
      "K"_a,
      "How a product of 1 to 8 rows is launched on an H200, for benchmarks.");
  m.def(
      "cuda_plan_for",
      &cuda_plan_for,
      "qtype"_a,
      "dtype"_a,
      "M"_a,
      "N"_a,
      "K"_a,
      "transpose"_a = true,
      "The plan of ``x @ W.T`` on an H200, x ``[M, K]`` of a dtype's name and "
      "W "
      "``[N, K]``.");
}

} // namespace mlx_gguf
