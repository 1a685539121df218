// The tensor copy engine and clusters of compute capability 9.0.
#pragma once
#include "ring.h"

// What the driver encodes: w as matrices of rows of 8-byte numbers.
struct alignas(64) TensorMap {
  uint8_t opaque[128];
};

// That this block runs; it orders no memory.
DEVICE void cluster_start() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
DEVICE void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

DEVICE void barrier_init(uint32_t barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier)
               : "memory");
}
DEVICE void barrier_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// The one arrival, and how many bytes complete the phase.
DEVICE void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
      "r"(bytes)
      : "memory");
}
DEVICE void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Writes 16 bytes to the same place in the shared memory of a cluster's block,
// and tells the barrier there.
DEVICE void put_remote(
    uint32_t to, uint32_t barrier, uint32_t rank, float4 value) {
  asm volatile(
      "{\n.reg .b32 there, told;\n"
      "mapa.shared::cluster.u32 there, %0, %2;\n"
      "mapa.shared::cluster.u32 told, %1, %2;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 "
      "[there], {%3, %4, %5, %6}, [told];\n}" ::"r"(to),
      "r"(barrier),
      "r"(rank),
      "r"(__float_as_uint(value.x)),
      "r"(__float_as_uint(value.y)),
      "r"(__float_as_uint(value.z)),
      "r"(__float_as_uint(value.w))
      : "memory");
}

// A number of the lane's that stays in a register: the compiler cannot make it
// again, and would, for every unit.
DEVICE uint32_t kept(uint32_t v) {
  return __shfl_sync(~0u, v, threadIdx.x);
}

DEVICE constexpr uint32_t power_in(
    uint32_t n) { // the largest power of two in n
  return n & -n;
}

// A warp's ring of COPY units of 16 rows, which start at multiples of COPY. A
// copy starts at 16 bytes and takes rows whose distance is a multiple of that:
// all 16, or every INTERLEAVE-th of 8, so that these take as many copies, each
// with `before` bytes before its data at most, and lie in that order. Copies go
// to multiples of 128 bytes. WIDE: 4 lanes of a row load 32 bytes at once, not
// 16.
template <typename F, int COPY, int INTERLEAVE, bool WIDE>
struct TmaRing {
  static constexpr uint32_t size = COPY * F::bytes;
  static constexpr uint32_t start = power_in(size | 16 / INTERLEAVE);
  static constexpr uint32_t before = 16 - start;
  // An odd number of 16 bytes keeps the rows of a load on different banks, and
  // wide ones twice that.
  static constexpr uint32_t pieces = (size + before + 15) / 16;
  static constexpr uint32_t stride =
      16 * (WIDE && pieces % 4 == 2 ? pieces : pieces | 1);
  static constexpr uint32_t in_copy = 8 / INTERLEAVE;
  static constexpr int copies = INTERLEAVE == 1 ? 1 : 2 * INTERLEAVE;
  static constexpr uint32_t copy_bytes = in_copy * stride;
  static constexpr uint32_t slot_bytes =
      INTERLEAVE == 1 ? copy_bytes : copy_bytes + 127 & ~127u;
  static constexpr uint32_t eight_bytes = INTERLEAVE * slot_bytes;
  static constexpr uint32_t stage_bytes = 2 * eight_bytes + 127 & ~127u;
  static constexpr uint32_t most_stages = 2;

  const TensorMap& w;
  const uint8_t* memory;
  uint32_t base; // of the warp's stages and their barriers
  uint32_t barriers;
  uint32_t lane;
  uint32_t row_bytes;

  DEVICE TmaRing(
      const TensorMap& w,
      const uint8_t* rings,
      const uint8_t* all_barriers,
      uint32_t stages,
      uint32_t warp,
      uint32_t lane,
      uint32_t row_bytes)
      : w(w),
        memory(rings),
        base(shared_address(rings) + warp * stages * stage_bytes),
        barriers(shared_address(all_barriers) + 8 * most_stages * warp),
        lane(lane),
        row_bytes(row_bytes) {
    // Before anything is loaded: the fence waits for that.
    if (lane == 0) {
      barrier_init(barriers);
    }
    barrier_fence();
    __syncwarp();
  }
  // The barrier of a second stage, which takes its time.
  DEVICE void init_second() const {
    if (lane == 0) {
      barrier_init(barriers + 8);
    }
    barrier_fence();
    __syncwarp();
  }
  // A stage by its address.
  DEVICE const uint8_t* at(uint32_t stage) const {
    return memory + (stage - shared_address(memory));
  }

  // Which of 8 rows row g is.
  DEVICE static uint32_t number(uint32_t g) {
    return g % in_copy * INTERLEAVE + g / in_copy;
  }
  // Where row g of 8 lies in a stage, and the unit's data in that.
  DEVICE static uint32_t row(uint32_t g) {
    return g / in_copy * slot_bytes + g % in_copy * stride;
  }
  DEVICE uint32_t data(uint32_t g, uint32_t unit) const {
    return before ? (g / in_copy * row_bytes + unit * F::bytes) % 16 : 0;
  }

  // The engine writes zeros past the matrix.
  DEVICE void fill(
      uint32_t stage,
      uint32_t barrier,
      uint32_t unit,
      uint32_t row,
      uint32_t matrix) const {
    if (lane == 0) {
      barrier_expect(barrier, 2 * INTERLEAVE * copy_bytes);
      UNROLL
      for (int i = 0; i < copies; ++i) {
        uint32_t from = i % INTERLEAVE * row_bytes + unit * F::bytes;
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.tile"
            ".mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::
                "r"(stage + i * slot_bytes),
            "l"(&w),
            "r"(from / 16 * 2),
            "r"((row + i / INTERLEAVE * 8) / INTERLEAVE),
            "r"(matrix),
            "r"(barrier)
            : "memory");
      }
    }
  }
};
