// The choice of an instruction set, once per process.
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "cpu/kernels.h"

namespace mlx_gguf::cpu {

extern const Isa isa_portable;
#if defined(__x86_64__)
extern const Isa isa_avx2;
extern const Isa isa_avx512;
extern const Isa isa_avx512vnni;
#endif

namespace {

struct Choice {
  const Isa* isa;
  bool runs_here;
};

const Isa& choose() {
#if defined(__x86_64__)
  bool avx512 =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
  const Choice choices[] = {
  // Best first. The features are those the file is compiled for.
#if defined(__x86_64__)
      {&isa_avx512vnni,
       avx512 && __builtin_cpu_supports("avx512vnni") &&
           __builtin_cpu_supports("bmi2")},
      {&isa_avx512, avx512},
      {&isa_avx2,
       __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c")},
#endif
      {&isa_portable, true},
  };
  const char* wanted = std::getenv("MLX_GGUF_ISA");
  for (const Choice& c : choices) {
    if (c.runs_here && (!wanted || std::string(wanted) == c.isa->name)) {
      return *c.isa;
    }
  }
  throw std::runtime_error(
      "[MLX_GGUF_ISA] Expected an instruction set of this machine. Received '" +
      std::string(wanted) + "'.");
}

} // namespace

const Isa& isa() {
  static const Isa& chosen = choose();
  return chosen;
}

} // namespace mlx_gguf::cpu
