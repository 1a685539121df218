// The bytes of 16 rows of w on their way through shared memory. A warp has a
// ring of its own: no other warp waits for it.
#pragma once
#include "../common.h"

DEVICE uint32_t shared_address(const void* p) {
  return uint32_t(__cvta_generic_to_shared(p));
}

// STAGES pieces of 16 rows, each of at most SIZE bytes from any address. Copies
// take 16 aligned bytes, so that a row in shared memory starts with up to 15
// bytes from before it; global addresses and those here agree modulo 16. Memory
// up to the next 16 bytes is read and never used.
template <int SIZE, int ALIGN, int STAGES>
struct Ring {
  static constexpr bool aligned = ALIGN % 16 == 0;
  static constexpr int pieces = (SIZE + (aligned ? 15 : 30)) / 16;
  // An odd number of pieces keeps the rows of a load on different banks.
  static constexpr int stride = 16 * (pieces | 1);
  static constexpr int stage_bytes = 16 * stride;
#if __CUDA_ARCH__ >= 900
  static constexpr int bytes = STAGES * stage_bytes + (8 * STAGES + 15 & ~15);
#else
  static constexpr int bytes = STAGES * stage_bytes;
#endif

  uint8_t* base;
  uint32_t lane;
  int put = 0; // stages filled and emptied so far
  int taken = 0;

#if __CUDA_ARCH__ >= 900
  // The copy engine fills a stage and tells its barrier, which expects 16 rows.
  DEVICE uint32_t barrier(int stage) const {
    return shared_address(base + STAGES * stage_bytes) + 8 * stage;
  }
  DEVICE Ring(uint8_t* memory, uint32_t lane) : base(memory), lane(lane) {
    if (lane < STAGES) {
      asm volatile(
          "mbarrier.init.shared::cta.b64 [%0], 16;" ::"r"(barrier(lane))
          : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
  }
  // `row` is where the data of row lane % 16 starts; `size` its bytes.
  DEVICE void fill(const uint8_t* row, uint32_t size) {
    int stage = put % STAGES;
    ++put;
    if (lane < 16) {
      uint64_t from = uint64_t(row) & ~15ull;
      uint32_t count = (uint32_t(uint64_t(row) - from) + size + 15) & ~15u;
      uint32_t to = shared_address(base + stage * stage_bytes + lane * stride);
      asm volatile(
          "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
              barrier(stage)),
          "r"(count)
          : "memory");
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
          "[%0], [%1], %2, [%3];" ::"r"(to),
          "l"(from),
          "r"(count),
          "r"(barrier(stage))
          : "memory");
    }
  }
  DEVICE void skip() {}
  DEVICE const uint8_t* take() {
    int stage = taken % STAGES;
    uint32_t parity = taken / STAGES & 1;
    ++taken;
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(barrier(stage)),
        "r"(parity)
        : "memory");
    return base + stage * stage_bytes;
  }
#else
  DEVICE Ring(uint8_t* memory, uint32_t lane) : base(memory), lane(lane) {}
  // Lanes 2 r and 2 r + 1 share row r.
  DEVICE void fill(const uint8_t* row, uint32_t size) {
    int stage = put % STAGES;
    ++put;
    uint64_t mine = __shfl_sync(~0u, uint64_t(row), lane / 2);
    uint64_t from = mine & ~15ull;
    uint32_t count = (uint32_t(mine - from) + size + 15) / 16;
    uint32_t to =
        shared_address(base + stage * stage_bytes + lane / 2 * stride);
    for (uint32_t i = lane % 2; i < count; i += 2) {
      asm volatile(
          "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + 16 * i),
          "l"(from + 16 * i)
          : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  // Groups are counted: one for a piece that does not exist.
  DEVICE void skip() {
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  DEVICE const uint8_t* take() {
    int stage = taken % STAGES;
    ++taken;
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
    __syncwarp();
    return base + stage * stage_bytes;
  }
#endif

  // Where row r's data starts in a stage, for the address it has in memory.
  DEVICE static const uint8_t* row(
      const uint8_t* stage, int r, const uint8_t* address) {
    uint32_t past = aligned ? 0 : uint32_t(uint64_t(address)) & 15;
    return stage + r * stride + past;
  }
};
