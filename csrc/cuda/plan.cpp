#include "cuda/plan.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <set>
#include <stdexcept>
#include <utility>

#include "cuda/names.h"

namespace mlx_gguf::cuda {

namespace {

using mlx::core::Dtype;

// When gemv_tma multiplies in whole numbers, whose x takes more memory. The
// other way is much slower for tables.
enum class Whole { never, with_room, always };

// What the kernels' structs of a type say: how many weights share a min, 0
// where there is none.
// paired: in whole numbers one row of x takes groups in pairs
// (cuda/tc/pairs.h).
struct UnitRow {
  std::string_view type;
  int summed;
  Whole whole = Whole::never;
  bool paired = false;
};
constexpr std::array unit_rows{
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

bool is_paired(const Plan& plan, const Format& format) {
  return plan.whole && plan.most == 1 && unit_row(format)->paired;
}

// Bytes of a row in one copy: cuda/tc/tma.h.
int64_t tma_box(const Plan& plan, const Format& format) {
  int64_t size = unit_bytes(format) * plan.copy;
  int64_t before = 16 - std::gcd<int64_t>(size, 16 / plan.interleave);
  int64_t pieces = ceil_div(size + before, 16);
  bool wide = format.alignment == 16 || is_paired(plan, format);
  return 16 * (wide && pieces % 4 == 2 ? pieces : pieces | 1);
}

int64_t tma_stage(const Plan& plan, const Format& format) {
  int64_t box = tma_box(plan, format);
  if (plan.interleave == 1) { // all 16 rows in one copy
    return ceil_div(16 * box, 128) * 128;
  }
  return 2 * plan.interleave * ceil_div(8 / plan.interleave * box, 128) * 128;
}

// A warp's ring in gemv and gemm: cuda/tc/ring.h.
int64_t ring_bytes(const Plan& plan, const Format& format, const Gpu& gpu) {
  int64_t size = plan.copy * unit_bytes(format);
  bool aligned = format.alignment % 16 == 0;
  int64_t pieces = (size + (aligned ? 15 : 30)) / 16;
  int64_t stages = plan.stages * 16 * 16 * (pieces | 1);
  return stages + (gpu.major >= 9 ? ceil_div(8 * plan.stages, 16) * 16 : 0);
}

// Of gemv_tma: cuda/gemv_tma.h and cuda/tc/digits.h.
constexpr int tma_warps = 16;
constexpr int64_t tall_rows = 65536; // pay for x once, however it is split
constexpr int digits_bytes = 832;    // of a unit of a row of x
constexpr int paired_digits_bytes = 928;
constexpr int zero_bytes = 256;       // that pairs have
constexpr int barrier_bytes = 16;     // of a warp's two stages at most
constexpr int64_t sums_bytes = 16384; // that rows of a batch may share

// Rows of x that a kernel is compiled for.
int most_of(bool whole, int64_t M) {
  return M <= (whole ? 2 : 1) ? static_cast<int>(M) : few_rows;
}

// Units a copy, in a ring of so many stages. Larger ones go in twos for one row
// of x where that leaves out bytes between them, which takes all the room.
int most_copied(const Format& format, const Plan& plan, int stages) {
  int unit = unit_bytes(format);
  bool one_tile = !plan.whole || plan.most <= 2; // of columns of x
  bool small = unit <= 192 && one_tile && stages > 1;
  bool uneven = unit > 192 && unit % 16 != 0 && plan.interleave == 1 &&
                plan.most == 1 && stages == 1;
  return plan.cluster <= 2 && (small || uneven) ? 2 : 1;
}

// The most parts that warps' stretches make of one of `split` tiles.
int64_t parts_of_tile(int64_t warps, int64_t split, int64_t pairs) {
  if (split >= 4 * warps) {
    return 1;
  }
  int64_t even = split & -split;
  int64_t inside = 2 * even > warps ? 0 : (warps - 2 * even) / split + 1;
  return std::min(pairs, inside + 1);
}

// Clusters that run at once, or at least: processors come in groups of 14 to
// 18, and a cluster stays in one. An H200 runs 66 clusters of 2 and 30 of 4.
int64_t clusters_of(int cluster, int64_t batch, const Gpu& gpu) {
  int64_t processors = cluster > 2 ? gpu.processors * 7 / 8 : gpu.processors;
  return std::max<int64_t>(processors / (cluster * batch), 1);
}

// A node with clusters costs the host more than one without (encode.cpp). Few
// rows of a short x go without, unless w is large, or not small and lone blocks
// would have more tiles than those of clusters.
constexpr int64_t short_x = 5120;
constexpr int64_t small_matrix = int64_t{1} << 24;
constexpr int64_t large_matrix = int64_t{1} << 25;
bool is_for_lone(int ranks, int64_t N, int64_t K, const Gpu& gpu) {
  if (ranks != 2 || K > short_x || N * K >= large_matrix) {
    return false;
  }
  auto most = [&](int cluster) {
    return ceil_div(ceil_div(N, 16), clusters_of(cluster, 1, gpu));
  };
  return N * K < small_matrix || 2 * most(1) <= most(2);
}

// Tiles whose work is split between the warps of a rank at a time. It sets the
// order of sums, so two ranks have twice a lone block's, in a cluster or not.
int64_t split_of(const Plan& plan, int64_t N, int64_t K, const Gpu& gpu) {
  int64_t tiles = ceil_div(N, 16);
  if (is_for_lone(plan.ranks, N, K, gpu)) {
    return plan.cluster * ceil_div(tiles, clusters_of(1, 1, gpu));
  }
  return ceil_div(tiles, clusters_of(plan.cluster, 1, gpu));
}

bool fits(
    const Plan& plan,
    const Format& format,
    int64_t M,
    int64_t N,
    int64_t K,
    int64_t batch,
    const Gpu& gpu) {
  return tma_launch(plan, format, M, N, K, batch, gpu).shared_bytes <=
         gpu.shared_bytes;
}

// Copies of two units, which are fewer, where they fit; more stages than 2 only
// delay what is needed first.
bool plan_ring(
    Plan& plan,
    const Format& format,
    int64_t M,
    int64_t N,
    int64_t K,
    int64_t batch,
    const Gpu& gpu) {
  constexpr std::pair<int, int> rings[] = {{2, 2}, {2, 1}, {1, 2}, {1, 1}};
  for (auto [copy, stages] : rings) {
    plan.copy = copy;
    plan.stages = stages;
    if (copy <= most_copied(format, plan, stages) &&
        fits(plan, format, M, N, K, batch, gpu)) {
      return true;
    }
  }
  return false;
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
  plan.groups = tma_warps;
  if (plan.interleave > 8 || N % plan.interleave != 0) {
    return false;
  }
  // The order of sums must not depend on M: what fits for the most.
  bool tall = N >= tall_rows;
  Whole whole = unit_row(format)->whole;
  for (int ranks : {tall ? 1 : 2, tall ? 2 : 1, 4, 8}) {
    for (bool in_whole : {true, false}) {
      bool could = whole != (in_whole ? Whole::never : Whole::always);
      plan.ranks = ranks;
      plan.whole = in_whole;
      auto shape = [&](int64_t M) {
        bool lone = M <= 2 && is_for_lone(ranks, N, K, gpu);
        plan.cluster = lone ? 1 : ranks;
        plan.most = most_of(in_whole, M);
      };
      shape(few_rows);
      if (could && plan_ring(plan, format, few_rows, N, K, 1, gpu)) {
        shape(M);
        return plan_ring(plan, format, M, N, K, batch, gpu);
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
  bool lone = plan.cluster == 1;
  int64_t tiles = ceil_div(N, 16), split = split_of(plan, N, K, gpu);
  out.split = 16 * split;
  // Even where there are copies of two, which start with an even unit.
  int64_t even = plan.ranks <= 2 ? 2 : 1;
  out.held = even * ceil_div(ceil_div(units_of(K), even), plan.ranks);
  out.box_bytes = static_cast<int>(tma_box(plan, format));
  int64_t parts = parts_of_tile(
      lone ? tma_warps / plan.ranks : tma_warps, split, ceil_div(out.held, 2));
  auto sums = [&](int64_t times, int64_t M) {
    int64_t owned = ceil_div(split * times, plan.cluster) * 16;
    bool direct = plan.ranks == 1 && parts == 1;
    return direct ? 0 : 4 * plan.ranks * parts * owned * M;
  };
  // Rows of several clusters for one where batches share them, unless it would
  // take too much memory.
  int64_t all = ceil_div(tiles, split);
  int64_t times = ceil_div(all, clusters_of(plan.cluster, batch, gpu));
  while (times > 1 && sums(times, few_rows) > sums_bytes) {
    times = (times + 1) / 2;
  }
  out.rows = out.split * times;
  out.clusters = ceil_div(N, out.rows);
  int64_t rings =
      tma_warps * (plan.stages * tma_stage(plan, format) + barrier_bytes);
  bool paired = is_paired(plan, format);
  int64_t row = paired       ? paired_digits_bytes
                : plan.whole ? digits_bytes
                             : column_bytes(format);
  int64_t held = lone ? units_of(K) : out.held;
  int64_t sent = lone ? 0 : 64 * tma_warps * M; // a tile a warp
  int64_t most = std::max(sums(times, M), std::min(sums_bytes, sums(all, M)));
  int64_t zeros = paired ? zero_bytes : 0;
  out.shared_bytes = rings + 16 + zeros + held * M * row + sent + most;
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
    for (int cluster : {1, 2, 4, 8}) {
      for (bool whole : {false, true}) {
        if (unit_row(format)->whole == (whole ? Whole::never : Whole::always)) {
          continue;
        }
        for (int M : {1, 2, few_rows}) {
          Plan plan{
              .kernel = Kernel::gemv_tma,
              .interleave = interleave,
              .cluster = cluster,
              .whole = whole,
              .most = most_of(whole, M)};
          int copied = std::max(
              most_copied(format, plan, 1), most_copied(format, plan, 2));
          for (; plan.copy <= copied; ++plan.copy) {
            add(plan, format, x);
          }
        }
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
