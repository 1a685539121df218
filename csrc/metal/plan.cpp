#include "metal/plan.h"

#include <algorithm>
#include <array>
#include <set>

#include "metal/names.h"

namespace mlx_gguf::metal {

namespace {

using mlx::core::Dtype;

// Types with a dot of their own, the preferred form first. Others are `block`.
struct FormsRow {
  std::string_view type;
  std::array<Form, 4> forms;
  int count;
};
constexpr std::array forms_table{
    FormsRow{"q4_0", {Form::subnormal, Form::magic}, 2},
    FormsRow{"q4_1", {Form::subnormal, Form::magic}, 2},
    FormsRow{"q5_0", {Form::subnormal, Form::magic}, 2},
    FormsRow{"q5_1", {Form::subnormal, Form::magic}, 2},
    FormsRow{
        "q4_k", {Form::subnormal, Form::magic, Form::shift, Form::wide}, 4},
    FormsRow{"q5_k", {Form::subnormal, Form::magic}, 2},
    FormsRow{"q6_k", {Form::subnormal, Form::magic}, 2},
    FormsRow{"q8_0", {Form::subnormal, Form::magic}, 2},
    FormsRow{"iq4_nl", {Form::table}, 1},
    FormsRow{"iq4_xs", {Form::table}, 1},
    FormsRow{"mxfp4", {Form::table}, 1},
};

std::vector<Form> forms_of(const Format& format) {
  for (const FormsRow& row : forms_table) {
    if (row.type == format.name) {
      return {row.forms.begin(), row.forms.begin() + row.count};
    }
  }
  return {Form::block};
}

// Rows of w by rows of x that a simdgroup may hold at once. `wide` ones need
// the few registers of packed weights.
struct GemvShape {
  int rows;
  int columns;
  bool wide;
};
constexpr std::array gemv_shapes{
    GemvShape{1, 1, false},
    GemvShape{2, 1, false},
    GemvShape{4, 1, false},
    GemvShape{8, 1, true},
    GemvShape{1, 2, true},
    GemvShape{2, 2, false},
    GemvShape{4, 2, true},
    GemvShape{1, 4, true},
    GemvShape{2, 4, false},
    GemvShape{1, 8, true},
    GemvShape{2, 8, false},
};
constexpr std::array simdgroup_counts{1, 2, 4};
constexpr int split_simdgroups = 4;

bool holds_packed(Form form) {
  return form != Form::block && form != Form::table;
}

constexpr std::array tile_sizes{32, 64};

// Rows of x from which dequantising w once to f32 and calling MLX's matmul
// beats decoding tiles again for every 64 rows.
constexpr int64_t matmul_crossover = 512;
// From this generation on MLX multiplies f32 matrices as tf32.
constexpr int tf32_generation = 17;

// Rows of w a simdgroup takes for M = 1: more reuse of x and its sums against
// registers, of which an x in f32 takes twice as many as one in half. Public
// measurements differ between the sizes of the M5.
int preferred_rows(Form form, Dtype x, const Gpu& gpu) {
  if (!holds_packed(form) || form == Form::shift) {
    return 2;
  }
  if (gpu.generation >= 17 && gpu.cores > 20) {
    return 2;
  }
  bool is_half = x.val() == Dtype::Val::float16;
  return gpu.generation >= 17 && is_half ? 8 : 4;
}

Form preferred_form(const Format& format, const Gpu& gpu) {
  auto forms = forms_of(format);
  if (forms[0] == Form::subnormal && !gpu.half_subnormals) {
    return forms[1];
  }
  return forms[0];
}

// Weights of a row that one step of a simdgroup covers, as metal/dots/ has it.
int64_t weights_per_step(const Format& format, Form form) {
  if (form == Form::block) {
    return format.packed() ? 32 * 32 : 32 * 8;
  }
  return format.block_size == 32 ? 16 * 32 : 4 * 256;
}

// Few rows leave cores idle unless simdgroups share them. Depends on nothing
// that varies with M: the split sets the order of a row's sums.
bool splits_k(
    const Format& format, Form form, int64_t N, int64_t K, const Gpu& gpu) {
  bool few_rows = N < int64_t{32} * gpu.cores;
  return few_rows && K >= split_simdgroups * weights_per_step(format, form);
}

Plan gemv_plan(
    const Format& format,
    Dtype x,
    int64_t M,
    int64_t N,
    int64_t K,
    const Gpu& gpu) {
  Plan plan{.kernel = Kernel::gemv, .form = preferred_form(format, gpu)};
  plan.columns = M == 1 ? 1 : M == 2 ? 2 : M <= 4 ? 4 : 8;
  plan.split_k = splits_k(format, plan.form, N, K, gpu);
  plan.simdgroups = plan.split_k ? split_simdgroups : 2;
  plan.rows = plan.columns == 1 ? preferred_rows(plan.form, x, gpu) : 2;
  if (plan.columns == 2 && holds_packed(plan.form)) {
    plan.rows = std::min(4, preferred_rows(plan.form, x, gpu));
  }
  // About 16 simdgroups a core hide the latency of memory.
  while (plan.rows > 2 && N / plan.rows < int64_t{16} * gpu.cores) {
    plan.rows /= 2;
  }
  return plan;
}

Plan tile_plan(Kernel kernel, int64_t M, bool transpose) {
  int tile = M <= 32 ? 32 : 64;
  return Plan{
      .kernel = kernel, .tile_m = tile, .tile_n = tile, .transpose = transpose};
}

} // namespace

Gpu gpu_from_architecture(std::string_view name, bool half_subnormals) {
  Gpu gpu{.half_subnormals = half_subnormals};
  auto g = name.rfind('g', name.size() < 2 ? 0 : name.size() - 2);
  if (g == std::string_view::npos || g + 2 >= name.size()) {
    return gpu;
  }
  int generation = 0;
  for (char c : name.substr(g + 1, name.size() - g - 2)) {
    if (c < '0' || c > '9') {
      return gpu;
    }
    generation = 10 * generation + (c - '0');
  }
  gpu.generation = std::clamp(generation, 13, 99);
  switch (name.back()) { // base or Pro, Max, Ultra
    case 'g':
      gpu.cores = 10;
      break;
    case 's':
    case 'c':
      gpu.cores = 32;
      break;
    case 'd':
      gpu.cores = 64;
      break;
  }
  return gpu;
}

Plan choose(
    const Format& format,
    Dtype x,
    int64_t M,
    int64_t N,
    int64_t K,
    bool transpose,
    const Gpu& gpu) {
  if (transpose && M <= 8) {
    return gemv_plan(format, x, M, N, K, gpu);
  }
  bool exact = gpu.generation < tf32_generation;
  if (exact && format.packed() && M >= matmul_crossover) {
    return Plan{.kernel = Kernel::matmul, .transpose = transpose};
  }
  return tile_plan(Kernel::gemm, M, transpose);
}

Plan choose_gather(
    const Format& format,
    Dtype x,
    int64_t M,
    int64_t N,
    int64_t K,
    int64_t pairs,
    int64_t experts,
    bool sorted,
    bool transpose,
    const Gpu& gpu) {
  // A tile of sorted rows pays where an expert has several of them.
  int64_t rows = pairs / std::max<int64_t>(experts, 1);
  if (sorted && M == 1 && (rows >= 4 || !transpose)) {
    return tile_plan(Kernel::gather_gemm, rows, transpose);
  }
  if (transpose && M <= 8) {
    return gemv_plan(format, x, M, N, K, gpu);
  }
  return tile_plan(Kernel::gemm, M, transpose);
}

std::vector<Plan> candidates(const Format& format) {
  std::vector<Plan> out;
  for (Form form : forms_of(format)) {
    for (const GemvShape& shape : gemv_shapes) {
      if (shape.wide && !holds_packed(form)) {
        continue;
      }
      for (int simdgroups : simdgroup_counts) {
        for (bool split : {false, true}) {
          if (split && simdgroups == 1) {
            continue;
          }
          out.push_back(
              Plan{
                  .kernel = Kernel::gemv,
                  .form = form,
                  .rows = shape.rows,
                  .columns = shape.columns,
                  .simdgroups = simdgroups,
                  .split_k = split});
        }
      }
    }
  }
  for (Kernel kernel : {Kernel::gemm, Kernel::gather_gemm}) {
    for (bool transpose : {true, false}) {
      for (int tile : tile_sizes) {
        out.push_back(
            Plan{
                .kernel = kernel,
                .tile_m = tile,
                .tile_n = tile,
                .transpose = transpose});
      }
    }
  }
  out.push_back(Plan{.kernel = Kernel::dequantize});
  return out;
}

std::vector<ListedKernel> metal_kernels() {
  std::vector<ListedKernel> out;
  std::set<std::string> seen;
  auto add = [&](const Plan& plan, const Format& format, Dtype x) {
    std::string name = kernel_name(plan, format, x);
    if (seen.insert(name).second) {
      std::string line = instantiation(plan, format, x);
      out.push_back({std::move(name), std::move(line), plan, &format, x});
    }
  };
  for (const Format& format : formats()) {
    if (!format.supported) {
      continue;
    }
    for (const Plan& plan : candidates(format)) {
      if (plan.kernel == Kernel::gemv && plan.simdgroups != 2) {
        continue; // the same names
      }
      for (Dtype x :
           {mlx::core::float16, mlx::core::bfloat16, mlx::core::float32}) {
        add(plan, format, x);
      }
    }
  }
  add(Plan{.kernel = Kernel::half_test}, formats()[0], mlx::core::float32);
  return out;
}

} // namespace mlx_gguf::metal
