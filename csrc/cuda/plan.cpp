#include "cuda/plan.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <set>
#include <stdexcept>

#include "cuda/names.h"

namespace mlx_gguf::cuda {

namespace {

using mlx::core::Dtype;

// What the kernels' structs of a type say: the alignment of its copies and how
// many weights share a min, 0 where there is none.
struct UnitRow {
  std::string_view type;
  int summed;
};
constexpr std::array unit_rows{
    UnitRow{"q4_0", 0},
    UnitRow{"q4_1", 32},
    UnitRow{"q5_0", 0},
    UnitRow{"q5_1", 32},
    UnitRow{"q8_0", 0},
    UnitRow{"q2_k", 16},
    UnitRow{"q3_k", 0},
    UnitRow{"q4_k", 32},
    UnitRow{"q5_k", 32},
    UnitRow{"q6_k", 0},
    UnitRow{"iq4_nl", 0},
    UnitRow{"iq4_xs", 0},
    UnitRow{"mxfp4", 0},
};

const UnitRow* unit_row(const Format& format) {
  for (const UnitRow& row : unit_rows) {
    if (row.type == format.name) {
      return &row;
    }
  }
  return nullptr;
}

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

int64_t units_of(int64_t K) {
  return ceil_div(K, 256);
}

int interleave_of(const Format& format, int64_t K) {
  int64_t bytes = format.row_bytes(K);
  return static_cast<int>(16 / std::gcd<int64_t>(16, bytes));
}

// Bytes from one row to the next in a copied stage, an odd number of 16.
int64_t stride_of(int64_t bytes) {
  return 16 * (ceil_div(bytes, 16) | 1);
}

int64_t tma_box(const Plan& plan, const Format& format) {
  int64_t unit = unit_bytes(format);
  bool even = unit % 16 == 0 && plan.interleave == 1;
  return stride_of(unit * plan.copy + (even ? 0 : 14));
}

int64_t tma_stage(const Plan& plan, const Format& format) {
  int64_t copied = 8 / plan.interleave * tma_box(plan, format);
  return 2 * plan.interleave * ceil_div(copied, 128) * 128;
}

// A warp's ring in gemv and gemm: cuda/tc/ring.h.
int64_t ring_bytes(const Plan& plan, const Format& format, const Gpu& gpu) {
  int64_t size = plan.copy * unit_bytes(format);
  bool aligned = format.alignment % 16 == 0;
  int64_t pieces = (size + (aligned ? 15 : 30)) / 16;
  int64_t stages = plan.stages * 16 * 16 * (pieces | 1);
  return stages + (gpu.major >= 9 ? ceil_div(8 * plan.stages, 16) * 16 : 0);
}

constexpr int usual_warps = 15; // of gemv_tma, which has registers for 16

// Warps that share a tile of rows split K. Few enough steps for the slowest,
// and with that few warps: each has an overhead. Depends on N and K alone,
// since the split sets the order of a row's sums.
int turns_of(int64_t rows, int64_t units) {
  int64_t tiles = ceil_div(rows, 16);
  int best = 1;
  int64_t least = INT64_MAX;
  for (int turns = 1; turns <= 4; ++turns) {
    int64_t groups = std::min<int64_t>(usual_warps / turns, tiles);
    int64_t steps = ceil_div(tiles, groups) * ceil_div(units, turns);
    if (steps < least) {
      least = steps;
      best = turns;
    }
  }
  return best;
}

int64_t rows_of(const Plan& plan, int64_t N, int64_t batch, const Gpu& gpu) {
  // Processors come in groups of 16 and 18; a larger cluster stays in one.
  int64_t processors =
      plan.cluster > 2 ? gpu.processors / 16 * 16 : gpu.processors;
  int64_t clusters = std::max<int64_t>(processors / (plan.cluster * batch), 1);
  return 8 * ceil_div(ceil_div(N, 8), clusters);
}

// More stages than 2 only delay what is needed first.
bool fits(
    Plan& plan,
    const Format& format,
    int64_t M,
    int64_t N,
    int64_t K,
    int64_t batch,
    const Gpu& gpu) {
  for (plan.stages = 2; plan.stages > 0; --plan.stages) {
    TmaLaunch launch = tma_launch(plan, format, M, N, K, batch, gpu);
    if (launch.shared_bytes <= gpu.shared_bytes) {
      plan.ahead = launch.held * M <= 2 * plan.groups * plan.turns ? 2 : 16;
      return true;
    }
  }
  return false;
}

// Larger copies pay where one block has many rows.
int copy_of(const Format& format, int cluster) {
  return cluster == 1 && unit_bytes(format) <= 256 ? 2 : 1;
}

// False where the copy engine cannot take w or shared memory not enough of x.
bool plan_tma(
    Plan& plan,
    const Format& format,
    int64_t M,
    int64_t N,
    int64_t K,
    int64_t batch,
    const Gpu& gpu) {
  plan.kernel = Kernel::gemv_tma;
  plan.interleave = interleave_of(format, K);
  if (plan.interleave > 8 || N % plan.interleave != 0) {
    return false;
  }
  // Very tall matrices pay for x once, however it is split.
  bool tall = N >= 65536;
  // A node with clusters costs the host more than one without (encode.cpp), and
  // only of a long x is preparing half worth it.
  bool alone = tall || K <= 5120;
  for (plan.cluster = alone ? 1 : 2; plan.cluster <= 4; plan.cluster *= 2) {
    plan.copy = copy_of(format, plan.cluster);
    int64_t rows = rows_of(plan, N, 1, gpu);
    int64_t units = ceil_div(units_of(K), plan.cluster);
    plan.turns = tall ? 1 : turns_of(rows, ceil_div(units, plan.copy));
    int64_t tiles = ceil_div(rows_of(plan, N, batch, gpu), 16);
    // The order of sums must not depend on M: fit for the most.
    for (int64_t warps : {tall ? 12 : usual_warps, 8, 4}) {
      int64_t groups = std::max<int64_t>(warps / plan.turns, 1);
      // As few as take the same number of steps.
      groups = ceil_div(tiles, ceil_div(tiles, groups));
      plan.groups = static_cast<int>(groups);
      if (fits(plan, format, few_rows, N, K, batch, gpu)) {
        return fits(plan, format, M, N, K, batch, gpu);
      }
    }
  }
  return false;
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

TmaLaunch tma_launch(
    const Plan& plan,
    const Format& format,
    int64_t M,
    int64_t N,
    int64_t K,
    int64_t batch,
    const Gpu& gpu) {
  TmaLaunch out{};
  out.rows = rows_of(plan, N, batch, gpu);
  out.owned = ceil_div(out.rows / 8, plan.cluster) * 8;
  out.held = ceil_div(units_of(K), plan.cluster);
  out.clusters = ceil_div(N, out.rows);
  out.box_bytes = static_cast<int>(tma_box(plan, format));
  int64_t warps = plan.groups * plan.turns;
  int64_t parts = plan.cluster * plan.turns;
  int64_t sums = ceil_div(parts * out.owned * M, 4) * 16;
  out.shared_bytes = warps * plan.stages * (tma_stage(plan, format) + 8) +
                     out.held * M * column_bytes(format) + sums;
  return out;
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

namespace {

// K is whole blocks: of rows of any such number of bytes.
template <typename Add>
void add_tma(const Format& format, Dtype x, const Add& add) {
  int most = std::min(16 / std::gcd(16, format.block_bytes), 8);
  for (int interleave = 1; parts_of(x) == 1 && interleave <= most;
       interleave *= 2) {
    for (int cluster : {1, 2, 4}) {
      for (int ahead : {2, 16}) {
        add({.kernel = Kernel::gemv_tma,
             .copy = copy_of(format, cluster),
             .interleave = interleave,
             .cluster = cluster,
             .ahead = ahead},
            format,
            x);
      }
    }
  }
}

} // namespace

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
      add_tma(format, x, add);
    }
  }
  return out;
}

} // namespace mlx_gguf::cuda
