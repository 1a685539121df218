// Plans and launches of gemv_tma.
#include <algorithm>
#include <numeric>
#include <utility>

#include "cuda/plan_units.h"

namespace mlx_gguf::cuda {

namespace {

using mlx::core::Dtype;

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
// 18, and a cluster stays in one. An H200 runs 66 clusters of 2, 28 to 30 of 4.
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

} // namespace

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

std::vector<Plan> tma_plans(const Format& format, Dtype x) {
  std::vector<Plan> out;
  // K is whole blocks: rows are any such number of bytes.
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
            out.push_back(plan);
          }
        }
      }
    }
  }
  return out;
}

} // namespace mlx_gguf::cuda
