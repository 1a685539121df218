// Prints what csrc/metal/ decides, for the tests: without arguments one JSON
// object for every kernel; else one line for each problem on standard input,
//   type dtype M N K transpose pairs experts sorted architecture subnormals
// (pairs 0: no gather) with the plan that is chosen and its kernel's name.
#include <iostream>
#include <string>

#include "metal/names.h"
#include "metal/plan.h"

using namespace mlx_gguf;
using namespace mlx_gguf::metal;
namespace mx = mlx::core;

namespace {

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
    }
    if (c != '\n') {
      out += c;
    }
  }
  return out + "\"";
}

const char* dtype_name(mx::Dtype x) {
  return x.val() == mx::Dtype::Val::float16    ? "f16"
         : x.val() == mx::Dtype::Val::bfloat16 ? "bf16"
                                               : "f32";
}

void print(const ListedKernel& k) {
  const Plan& p = k.plan;
  Geometry g = geometry(p);
  std::cout << "{\"name\":" << quoted(k.name)
            << ",\"instantiation\":" << quoted(k.instantiation)
            << ",\"kernel\":" << quoted(to_string(p.kernel))
            << ",\"form\":" << quoted(to_string(p.form))
            << ",\"rows\":" << p.rows << ",\"columns\":" << p.columns
            << ",\"split_k\":" << (p.split_k ? "true" : "false")
            << ",\"transpose\":" << (p.transpose ? "true" : "false")
            << ",\"format\":" << quoted(k.format->name)
            << ",\"x\":" << quoted(dtype_name(k.x)) << ",\"tile\":["
            << g.columns << "," << g.rows << "],\"threads\":" << g.threads
            << "}\n";
}

} // namespace

int main(int argc, char**) {
  if (argc == 1) {
    for (const ListedKernel& kernel : metal_kernels()) {
      print(kernel);
    }
    return 0;
  }
  std::string type, dtype, architecture;
  int64_t M, N, K, pairs, experts;
  bool transpose, sorted, subnormals;
  while (std::cin >> type >> dtype >> M >> N >> K >> transpose >> pairs >>
         experts >> sorted >> architecture >> subnormals) {
    const Format& format = *find_format(type);
    mx::Dtype x = dtype == "f16"    ? mx::float16
                  : dtype == "bf16" ? mx::bfloat16
                                    : mx::float32;
    Gpu gpu = gpu_from_architecture(architecture, subnormals);
    Plan plan =
        pairs ? choose_gather(
                    format, x, M, N, K, pairs, experts, sorted, transpose, gpu)
              : choose(format, x, M, N, K, transpose, gpu);
    std::cout << kernel_name(plan, format, x) << " " << plan.simdgroups << " "
              << to_string(plan) << "\n";
  }
}
