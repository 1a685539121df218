#include "cuda/ahead.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <string>
#include <thread>

#include "cuda/module.h"
#include "cuda/names.h"

namespace mlx_gguf::cuda {

namespace {

// The plans whose kernels a problem takes.
std::vector<Plan> plans_of(const Problem& p) {
  Plan dequantize{.kernel = Kernel::dequantize};
  if (p.M == 0) {
    return {dequantize};
  }
  const Format& format = *p.format;
  Plan plan =
      p.experts > 0
          ? choose_gather(
                format,
                p.x,
                1,
                p.N,
                p.K,
                p.M,
                p.experts,
                p.M > few_rows,
                p.transpose,
                true,
                gpu())
          : choose(format, p.x, p.M, p.N, p.K, 1, p.transpose, true, gpu());
  switch (plan.kernel) {
    case Kernel::dense:
      return {dequantize};
    case Kernel::gemm:
    case Kernel::gather_gemm:
      return {Plan{.kernel = Kernel::prepare}, plan};
    default:
      return {plan};
  }
}

// Each holds the whole source in memory.
constexpr size_t most_compilers = 16;
size_t compilers() {
  size_t processors = std::max(1u, std::thread::hardware_concurrency());
  return std::min(processors, most_compilers);
}

} // namespace

void compile_ahead(
    const std::vector<Problem>& problems,
    const std::vector<std::string>& functions) {
  std::map<std::string, std::function<void()>> kernels; // each once
  for (const Problem& p : problems) {
    for (const Plan& plan : plans_of(p)) {
      kernels.insert({kernel_name(plan, *p.format, p.x), [plan, p] {
                        function(plan, *p.format, p.x);
                      }});
    }
  }
  for (const std::string& name : functions) {
    kernels.insert({name, [name] { function(name); }});
  }
  std::vector<std::function<void()>> work;
  for (auto& [name, make] : kernels) {
    work.push_back(make);
  }
  std::atomic<size_t> next{0};
  auto run = [&] {
    for (size_t i; (i = next++) < work.size();) {
      try {
        work[i]();
      } catch (const std::exception&) {
        // Whoever needs the kernel is told.
      }
    }
  };
  std::vector<std::thread> threads;
  threads.reserve(most_compilers);
  try {
    while (threads.size() + 1 < std::min(compilers(), work.size())) {
      threads.emplace_back(run);
    }
  } catch (const std::exception&) {
    // As many as there can be.
  }
  run();
  for (std::thread& thread : threads) {
    thread.join();
  }
}

} // namespace mlx_gguf::cuda
