#include "cuda/plan.h"

#include <algorithm>
#include <set>

#include "cuda/names.h"
#include "cuda/plan_units.h"

namespace mlx_gguf::cuda {

namespace {

using mlx::core::Dtype;

// A warp's ring in gemv and gemm: cuda/tc/ring.h.
int64_t ring_bytes(const Plan& plan, const Format& format, const Gpu& gpu) {
  int64_t size = plan.copy * unit_bytes(format);
  bool aligned = format.alignment % 16 == 0;
  int64_t pieces = (size + (aligned ? 15 : 30)) / 16;
  int64_t stages = plan.stages * 16 * 16 * (pieces | 1);
  return stages + (gpu.major >= 9 ? ceil_div(8 * plan.stages, 16) * 16 : 0);
}

} // namespace

Plan gemv_plan(
    const Format& format,
    Dtype x,
    int64_t M,
    int64_t N,
    int64_t K,
    int64_t batch,
    bool aligned,
    const Gpu& gpu) {
  Plan plan;
  if (!has_units(format)) {
    return Plan{.kernel = Kernel::gemv_block};
  }
  bool tma = gpu.major >= 9 && aligned && parts_of(x) == 1 && batch <= 65535;
  if (tma && plan_tma(plan, format, M, N, K, batch, gpu)) {
    return plan;
  }
  plan = Plan{.kernel = Kernel::gemv, .copy = 1, .stages = 2};
  plan.tiles = parts_of(x) == 1 ? 1 : M <= 2 ? 1 : 3;
  plan.groups = N >= 32 * gpu.processors ? 2 : 1;
  plan.turns = 4;
  for (; plan.groups > 0; --plan.groups) {
    if (gemv_launch(plan, format, x, M, K, gpu).shared_bytes <=
        gpu.shared_bytes) {
      return plan;
    }
  }
  return Plan{.kernel = Kernel::gemv_block};
}

int parts_of(Dtype x) {
  return x.val() == Dtype::Val::float32 ? 3 : 1;
}

bool has_units(const Format& format) {
  return unit_row(format) != nullptr;
}

int unit_bytes(const Format& format) {
  return format.block_bytes * (256 / format.block_size);
}

int column_bytes(const Format& format) {
  int summed = unit_row(format)->summed;
  int used = 512 + (summed ? 32 * (32 / summed) : 0) + 4;
  return (used + 63) / 128 * 128 + 64;
}

GemvLaunch gemv_launch(
    const Plan& plan,
    const Format& format,
    Dtype x,
    int64_t M,
    int64_t K,
    const Gpu& gpu) {
  int64_t warps = plan.groups * plan.turns;
  int64_t unit = M * parts_of(x) * column_bytes(format);
  int64_t step = plan.turns * plan.copy;
  int64_t rings = warps * ring_bytes(plan, format, gpu);
  // Two blocks a multiprocessor where x allows it.
  int64_t room = std::max<int64_t>(gpu.shared_bytes / 2 - rings, unit * step);
  GemvLaunch out{};
  out.held = std::min(
      ceil_div(units_of(K), step) * step,
      std::max(room / unit / step, int64_t{1}) * step);
  int64_t sums = warps * 16 * (8 * plan.tiles + 2) * 4;
  out.shared_bytes =
      std::max(ceil_div(out.held * unit, 128) * 128 + rings, sums);
  return out;
}

int gemm_rows(Dtype x) {
  return 64 / parts_of(x);
}

int64_t gemm_shared_bytes(const Format& format) {
  Plan plan{.kernel = Kernel::gemm};
  int64_t sums = 8 * 16 * (64 + 2) * 4;
  return std::max(
      2 * 64 * column_bytes(format) + 8 * ring_bytes(plan, format, Gpu{}),
      sums);
}

std::vector<ListedKernel> cuda_kernels() {
  std::vector<ListedKernel> out;
  std::set<std::string> seen;
  auto add = [&](const Plan& plan, const Format& format, Dtype x) {
    std::string name = kernel_name(plan, format, x);
    if (seen.insert(name).second) {
      int least = plan.kernel == Kernel::gemv_tma ? 90 : 80;
      out.push_back({name, function_of(plan, format, x), least});
    }
  };
  for (const Format& format : formats()) {
    if (!format.supported) {
      continue;
    }
    for (Dtype x :
         {mlx::core::float16, mlx::core::bfloat16, mlx::core::float32}) {
      add({.kernel = Kernel::dequantize}, format, x);
      for (bool transpose : {true, false}) {
        for (Kernel kernel : {Kernel::gemm_block, Kernel::gather_gemm_block}) {
          add({.kernel = kernel, .transpose = transpose}, format, x);
        }
      }
      add({.kernel = Kernel::gemv_block}, format, x);
      if (!has_units(format)) {
        continue;
      }
      for (Kernel kernel :
           {Kernel::prepare, Kernel::gemm, Kernel::gather_gemm}) {
        add({.kernel = kernel}, format, x);
      }
      for (int tiles : {1, 3}) {
        if (tiles == 1 || parts_of(x) == 3) {
          add({.kernel = Kernel::gemv, .tiles = tiles}, format, x);
        }
      }
      for (const Plan& plan : tma_plans(format, x)) {
        add(plan, format, x);
      }
    }
  }
  return out;
}

} // namespace mlx_gguf::cuda
