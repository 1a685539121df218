// What an Arm processor has beyond the architecture's baseline.
#pragma once

#ifdef __aarch64__

#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace mlx_gguf::cpu {

// Dot products of bytes.
inline bool has_dotprod() {
#if defined(__linux__)
  constexpr unsigned long asimddp = 1ul << 20; // HWCAP_ASIMDDP
  return (getauxval(AT_HWCAP) & asimddp) != 0;
#elif defined(__APPLE__)
  int has = 0;
  size_t size = sizeof(has);
  const char* name = "hw.optional.arm.FEAT_DotProd";
  return sysctlbyname(name, &has, &size, nullptr, 0) == 0 && has != 0;
#else
  return false;
#endif
}

} // namespace mlx_gguf::cpu

#endif
