#include "cuda/names.h"

#include <algorithm>
#include <cctype>
#include <stdexcept>

#include "cuda/attend.h"

namespace mlx_gguf::cuda {

namespace {

using mlx::core::Dtype;

struct DtypeNames {
  const char* ours;
  const char* cuda;
};

DtypeNames names_of(Dtype x) {
  switch (x.val()) {
    case Dtype::Val::float16:
      return {"f16", "half_t"};
    case Dtype::Val::bfloat16:
      return {"bf16", "bfloat_t"};
    case Dtype::Val::float32:
      return {"f32", "float"};
    default:
      throw std::invalid_argument(
          "[cuda::kernel_name] Expected x of dtype float16, bfloat16 or "
          "float32.");
  }
}

// "q4_k" is Q4_K in cuda/.
std::string struct_of(const Format& format) {
  std::string out = format.name;
  for (char& c : out) {
    c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  }
  return out;
}

} // namespace

std::string kernel_name(const Plan& plan, const Format& format, Dtype x) {
  std::string out = "gguf_" + to_string(plan.kernel) + "_" + format.name + "_" +
                    names_of(x).ours;
  switch (plan.kernel) {
    case Kernel::gemv_tma:
      return out + "_copy" + std::to_string(plan.copy) + "_every" +
             std::to_string(plan.interleave) + "_cluster" +
             std::to_string(plan.cluster) + "_rows" +
             std::to_string(plan.most) + (plan.whole ? "_whole" : "");
    case Kernel::gemv:
      return out + "_tiles" + std::to_string(plan.tiles);
    case Kernel::gemm_block:
    case Kernel::gather_gemm_block:
      return out + (plan.transpose ? "_t" : "_n");
    default:
      return out;
  }
}

std::string function_of(const Plan& plan, const Format& format, Dtype x) {
  std::string type = struct_of(format), t = names_of(x).cuda;
  std::string unit = "Tc" + type;
  auto number = [](int value) { return std::to_string(value); };
  auto truth = [](bool value) { return value ? "true" : "false"; };
  switch (plan.kernel) {
    case Kernel::gemv_tma:
      return "gemv_tma<" + unit + ", " + t + ", " + number(plan.copy) + ", " +
             number(plan.interleave) + ", " + number(plan.cluster) + ", " +
             number(plan.most) + ", " + truth(plan.whole) + ">";
    case Kernel::gemv:
      return "gemv<" + unit + ", " + t + ", " + number(plan.tiles) + ", 1, 2>";
    case Kernel::gemv_block:
      return "gemv_block<" + type + ", " + t + ">";
    case Kernel::prepare:
      return "prepare<" + unit + ", " + t + ">";
    case Kernel::gemm:
    case Kernel::gather_gemm:
      return "gemm<" + unit + ", " + t + ", " +
             truth(plan.kernel == Kernel::gather_gemm) + ">";
    case Kernel::gemm_block:
    case Kernel::gather_gemm_block:
      return "gemm_block<" + type + ", " + t + ", " + truth(plan.transpose) +
             ", " + truth(plan.kernel == Kernel::gather_gemm_block) + ">";
    case Kernel::dequantize:
      return "dequantize<" + type + ", " + t + ">";
    case Kernel::dense: // MLX's kernel
      break;
  }
  throw std::logic_error("[cuda::function_of] Expected a known kernel.");
}

const char* type_name(Dtype x) {
  return names_of(x).cuda;
}

std::string delta_function(Dtype x, int width) {
  return std::string("gated_delta<") + type_name(x) + ", " +
         std::to_string(width) + ">";
}

StepFunctions step_functions(const Sizes& sizes, Dtype x, int rows) {
  std::string T = type_name(x);
  AttendPlan plan = attend_plan(sizes, rows);
  std::string numbers;
  for (int n : {sizes.head_dim, plan.heads, plan.lanes, attend_warps}) {
    numbers += ", " + std::to_string(n);
  }
  StepFunctions out{
      .norm = "rms_norm<" + T + ">",
      .gate = "gated<" + T + ">",
      .attend = "attend<" + T + numbers + ">"};
  if (sizes.delta.heads > 0) {
    out.delta =
        "delta_step<" + T + ", " + std::to_string(sizes.delta.head_dim) + ">";
  }
  if (sizes.experts.count > 0) {
    out.route = "route<" + T + ">";
    out.combine = "combine<" + T + ">";
  }
  return out;
}

std::vector<std::string> all_functions(const Sizes& sizes, Dtype x) {
  std::vector<std::string> out;
  if (!takes_steps(sizes)) {
    return out;
  }
  constexpr int few = 1, many = 1 << 20;
  for (int rows : {few, many}) {
    StepFunctions f = step_functions(sizes, x, rows);
    for (auto& name : {f.norm, f.gate, f.attend, f.delta, f.route, f.combine}) {
      if (!name.empty() &&
          std::find(out.begin(), out.end(), name) == out.end()) {
        out.push_back(name);
      }
    }
  }
  return out;
}

} // namespace mlx_gguf::cuda
