#include "cpu/amx_features.h"

#ifdef MLX_GGUF_HAS_AMX // the compiler, of x86-64 Linux

#include <cpuid.h>
#include <immintrin.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <csetjmp>
#include <csignal>
#include <cstdint>

namespace mlx_gguf::cpu {

namespace {

bool processor_has_it() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) ||
      !__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
    return false;
  }
  constexpr unsigned tiles = 1u << 24, bytes = 1u << 25;
  if ((d & tiles) == 0 || (d & bytes) == 0) {
    return false;
  }
  uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr uint32_t state = 3u << 17; // of tiles: their shapes and their data
  return (low & state) == state;
}

// Linux gives a process this state on request, unless the stack of one of its
// signal handlers is too small for it.
bool system_gives_it() {
  constexpr long request = 0x1023, tile_data = 18; // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, request, tile_data) == 0;
}

sigjmp_buf after_fault;
pthread_t prober;
struct sigaction handler_before;

void on_fault(int) {
  if (pthread_equal(pthread_self(), prober)) {
    siglongjmp(after_fault, 1);
  }
  // Another thread's fault, which happens again under the handler it had.
  sigaction(SIGILL, &handler_before, nullptr);
}

__attribute__((target("amx-tile,amx-int8"))) void multiply_tiles() {
  alignas(64) uint8_t shapes[64] = {1};
  for (int tile = 0; tile < 3; ++tile) {
    shapes[16 + 2 * tile] = 4; // bytes
    shapes[48 + tile] = 1;     // rows
  }
  __asm__ volatile("" : "+m"(shapes)); // all of it is read
  _tile_loadconfig(shapes);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_dpbssd(0, 1, 2);
  _tile_release();
}

// A system that promises tiles and then refuses them must not end the process.
bool runs() {
  struct sigaction own = {};
  own.sa_handler = on_fault;
  prober = pthread_self();
  if (sigaction(SIGILL, nullptr, &handler_before) != 0 ||
      sigaction(SIGILL, &own, nullptr) != 0) {
    return false;
  }
  volatile bool fine = false;
  if (sigsetjmp(after_fault, 1) == 0) {
    multiply_tiles();
    fine = true;
  }
  sigaction(SIGILL, &handler_before, nullptr);
  return fine;
}

} // namespace

bool has_amx() {
  static const bool has = processor_has_it() && system_gives_it() && runs();
  return has;
}

} // namespace mlx_gguf::cpu

#else

namespace mlx_gguf::cpu {

bool has_amx() {
  return false;
}

} // namespace mlx_gguf::cpu

#endif
