#include "metal/names.h"

#include <algorithm>
#include <cctype>
#include <stdexcept>

namespace mlx_gguf::metal {

namespace {

using mlx::core::Dtype;

struct DtypeNames {
  const char* ours;
  const char* metal;
};

DtypeNames names_of(Dtype x) {
  switch (x.val()) {
    case Dtype::Val::float16:
      return {"f16", "half"};
    case Dtype::Val::bfloat16:
      return {"bf16", "bfloat"};
    case Dtype::Val::float32:
      return {"f32", "float"};
    default:
      throw std::invalid_argument(
          "[metal::kernel_name] Expected x of float16, bfloat16 or float32. "
          "Received dtype number " +
          std::to_string(static_cast<int>(x.val())) + ".");
  }
}

// metal/formats/ names a type's struct as GGUF names the type, in capitals.
std::string struct_of(const Format& format) {
  std::string out = format.name;
  std::transform(out.begin(), out.end(), out.begin(), [](unsigned char c) {
    return static_cast<char>(std::toupper(c));
  });
  return out;
}

// The class template of metal/dots/ that a form is.
std::string dot_of(const Format& format, Form form) {
  std::string type = struct_of(format);
  switch (form) {
    case Form::block:
      return "BlockDot<" + type + ">";
    case Form::shift:
      return "ShiftDot<" + type + ">";
    case Form::subnormal:
      return "CodeDot<" + type + ", Subnormal>";
    case Form::magic:
      return "CodeDot<" + type + ", Magic>";
    case Form::wide:
      return "WideDot<" + type + ">";
    case Form::table:
      return "TableDot<" + type + ">";
  }
  throw std::logic_error("[metal::instantiation] Expected a known form.");
}

std::string tile_of(const Plan& plan, const char* separator) {
  return std::to_string(plan.tile_m) + separator + std::to_string(plan.tile_n);
}

// Of dequantize's output, which is f32 where a matmul follows.
Dtype dequantized(const Plan& plan, Dtype x) {
  return plan.kernel == Kernel::matmul ? mlx::core::float32 : x;
}

// The function with its template arguments.
std::string function_of(const Plan& plan, const Format& format, Dtype x) {
  switch (plan.kernel) {
    case Kernel::gemv:
      return "gemv<" + dot_of(format, plan.form) + ", " + names_of(x).metal +
             ", " + std::to_string(plan.rows) + ", " +
             std::to_string(plan.columns) + ", " +
             (plan.split_k ? "true" : "false") + ">";
    case Kernel::gemm:
    case Kernel::gather_gemm:
      return std::string(to_string(plan.kernel)) + "<" + struct_of(format) +
             ", " + names_of(x).metal + ", " + tile_of(plan, ", ") + ", " +
             (plan.transpose ? "true" : "false") + ">";
    case Kernel::dequantize:
    case Kernel::matmul:
      return "dequantize<" + struct_of(format) + ", " +
             names_of(dequantized(plan, x)).metal + ">";
    case Kernel::half_test:
      return "half_test<Subnormal>";
  }
  throw std::logic_error("[metal::instantiation] Expected a known kernel.");
}

} // namespace

std::string kernel_name(const Plan& plan, const Format& format, Dtype x) {
  std::string type = format.name, dtype = names_of(x).ours;
  switch (plan.kernel) {
    case Kernel::gemv:
      return "gguf_gemv_" + type + "_" + to_string(plan.form) + "_" + dtype +
             "_r" + std::to_string(plan.rows) + "_c" +
             std::to_string(plan.columns) + (plan.split_k ? "_split" : "");
    case Kernel::gemm:
    case Kernel::gather_gemm:
      return std::string("gguf_") + to_string(plan.kernel) + "_" + type + "_" +
             dtype + (plan.transpose ? "_t_" : "_n_") + tile_of(plan, "x");
    case Kernel::dequantize:
    case Kernel::matmul:
      return "gguf_dequantize_" + type + "_" +
             names_of(dequantized(plan, x)).ours;
    case Kernel::half_test:
      return "gguf_half_test";
  }
  throw std::logic_error("[metal::kernel_name] Expected a known kernel.");
}

std::string instantiation(const Plan& plan, const Format& format, Dtype x) {
  std::string function = function_of(plan, format, x);
  return "template [[host_name(\"" + kernel_name(plan, format, x) +
         "\")]] [[kernel]] decltype(" + function + ") " + function + ";\n";
}

Geometry geometry(const Plan& plan) {
  // Threads and pieces as in metal/: a simdgroup is 32 lanes, a tile 128
  // threads, dequantize 64 threads of 16 weights.
  switch (plan.kernel) {
    case Kernel::gemv: {
      int rows = plan.split_k ? plan.rows : plan.rows * plan.simdgroups;
      return {rows, plan.columns, 32 * plan.simdgroups};
    }
    case Kernel::gemm:
    case Kernel::gather_gemm:
      return {plan.tile_n, plan.tile_m, 128};
    case Kernel::dequantize:
    case Kernel::matmul:
      return {64 * 16, 1, 64};
    case Kernel::half_test:
      return {32, 1, 32};
  }
  throw std::logic_error("[metal::geometry] Expected a known kernel.");
}

} // namespace mlx_gguf::metal
