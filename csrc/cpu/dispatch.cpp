// The choice of an instruction set, once per process.
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>

#include "cpu/amx_features.h"
#include "cpu/arm_features.h"
#include "cpu/kernels.h"

namespace mlx_gguf::cpu {

extern const Isa isa_portable;
#if defined(__x86_64__)
extern const Isa isa_avx2;
extern const Isa isa_avx512;
extern const Isa isa_avx512vnni;
#ifdef MLX_GGUF_HAS_AMX
extern const Isa isa_avx512amx;
#endif
#elif defined(__aarch64__)
extern const Isa isa_neon;
extern const Isa isa_neon_dotprod;
#endif

namespace {

std::vector<const Isa*> find() {
  std::vector<const Isa*> found;
#if defined(__x86_64__)
  // The features are those that CMakeLists.txt compiles each file for.
  bool avx512 =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  bool vnni = avx512 && __builtin_cpu_supports("avx512vnni") &&
              __builtin_cpu_supports("gfni");
#ifdef MLX_GGUF_HAS_AMX
  if (vnni && has_amx()) {
    found.push_back(&isa_avx512amx);
  }
#endif
  if (vnni) {
    found.push_back(&isa_avx512vnni);
  }
  if (avx512) {
    found.push_back(&isa_avx512);
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
    found.push_back(&isa_avx2);
  }
#elif defined(__aarch64__)
  if (has_dotprod()) {
    found.push_back(&isa_neon_dotprod);
  }
  found.push_back(&isa_neon);
#endif
  found.push_back(&isa_portable);
  return found;
}

const Isa& choose() {
  const char* wanted = std::getenv("MLX_GGUF_ISA");
  for (const Isa* isa : isas()) {
    if (!wanted || std::string_view(wanted) == isa->name) {
      return *isa;
    }
  }
  throw std::runtime_error(
      "[MLX_GGUF_ISA] Expected an instruction set of this machine. Received '" +
      std::string(wanted) + "'.");
}

} // namespace

const std::vector<const Isa*>& isas() {
  static const std::vector<const Isa*> found = find();
  return found;
}

const Isa& isa() {
  static const Isa& chosen = choose();
  return chosen;
}

} // namespace mlx_gguf::cpu
