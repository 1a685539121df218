#include "cpu/read_floor.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <string_view>

#include "cpu/kernels.h"
#include "cpu/threads.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace mlx_gguf::cpu {

namespace {

typedef uint64_t Lane __attribute__((vector_size(16)));

std::atomic<uint64_t> sink; // keeps loads and sums from being removed

// Processors fetch ahead for each place that is read in turn: with one stream a
// Xeon gets two thirds of what it does with eight. Eight sums also stay in
// registers; what is left over is less than a line for each stream.
void read(const uint8_t* data, int64_t bytes) {
  constexpr int streams = 8, line = 64;
  int64_t part = bytes / streams / line * line;
  Lane sums[streams] = {};
  for (int64_t at = 0; at < part; at += line) {
    for (int s = 0; s < streams; ++s) {
      for (int k = 0; k < line; k += sizeof(Lane)) {
        Lane x;
        std::memcpy(&x, data + s * part + at + k, sizeof(x));
        sums[s] ^= x;
      }
    }
  }
  Lane sum = {};
  for (int s = 0; s < streams; ++s) {
    sum ^= sums[s];
  }
  sink.fetch_xor(sum[0] ^ sum[1], std::memory_order_relaxed);
}

double seconds_of(int64_t pieces, const std::function<void(int64_t)>& body) {
  auto start = std::chrono::steady_clock::now();
  parallel_for(pieces, body);
  std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  return took.count();
}

// Sums that do not wait for each other: they hide the latency of two units, and
// 16 registers hold them with their operands. They start from numbers that are
// not known and differ, or the compiler would make one of them.
constexpr int chains = 12;
constexpr int64_t steps = 1 << 14;

// `lanes` floats are one register of the instruction set that is the target.
// The sums tend to 1: no step takes longer than another.
#define MLX_GGUF_MULTIPLY_ADDS(name, lanes, ...)                   \
  __VA_ARGS__ int64_t name() {                                     \
    typedef float Vec __attribute__((vector_size(lanes * 4)));     \
    float seed = float(sink.load() & 1);                           \
    Vec acc[chains];                                               \
    for (int c = 0; c < chains; ++c) {                             \
      acc[c] = Vec{} + (seed + c);                                 \
    }                                                              \
    for (int64_t i = 0; i < steps; ++i) {                          \
      for (int c = 0; c < chains; ++c) {                           \
        acc[c] = acc[c] * 0.5f + 0.5f;                             \
      }                                                            \
    }                                                              \
    Vec total = {};                                                \
    for (int c = 0; c < chains; ++c) {                             \
      total += acc[c];                                             \
    }                                                              \
    sink.fetch_add(uint64_t(total[0]), std::memory_order_relaxed); \
    return steps * chains * lanes * 2;                             \
  }

MLX_GGUF_MULTIPLY_ADDS(f32_baseline, 4)
#if defined(__x86_64__)
MLX_GGUF_MULTIPLY_ADDS(f32_avx2, 8, __attribute__((target("avx2,fma"))))
MLX_GGUF_MULTIPLY_ADDS(f32_avx512, 16, __attribute__((target("avx512f"))))

__attribute__((target("avx512f,avx512vnni"))) int64_t int8_vnni() {
  int seed = int(sink.load() & 1);
  __m512i acc[chains];
  for (int c = 0; c < chains; ++c) {
    acc[c] = _mm512_set1_epi32(seed + c);
  }
  __m512i a = _mm512_set1_epi8(1);
  for (int64_t i = 0; i < steps; ++i) {
    for (int c = 0; c < chains; ++c) {
      acc[c] = _mm512_dpbusd_epi32(acc[c], a, a);
    }
  }
  __m512i total = acc[0];
  for (int c = 1; c < chains; ++c) {
    total = _mm512_add_epi32(total, acc[c]);
  }
  sink.fetch_add(_mm512_cvtsi512_si32(total), std::memory_order_relaxed);
  return steps * chains * 64 * 2;
}

#ifdef MLX_GGUF_HAS_AMX
__attribute__((target("amx-tile,amx-int8"))) int64_t int8_amx() {
  alignas(64) uint8_t shapes[64] = {1};
  for (int tile = 0; tile < 8; ++tile) {
    shapes[16 + 2 * tile] = 64; // bytes
    shapes[48 + tile] = 16;     // rows
  }
  __asm__ volatile("" : "+m"(shapes)); // all of it is read
  _tile_loadconfig(shapes);
  for (int64_t i = 0; i < steps; ++i) {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
  _tile_release();
  return steps * 4 * 16 * 16 * 64 * 2;
}
#endif
#endif

double per_second(int64_t (*work)()) {
  int64_t pieces = 64 * num_threads();
  std::atomic<int64_t> done{0};
  double took = seconds_of(pieces, [&](int64_t) {
    done.fetch_add(work(), std::memory_order_relaxed);
  });
  return done.load() / took;
}

} // namespace

double read_seconds(const uint8_t* data, int64_t bytes) {
  constexpr int64_t piece = 256 << 10;
  return seconds_of((bytes + piece - 1) / piece, [&](int64_t i) {
    const uint8_t* start = data + i * piece;
    read(start, std::min(piece, bytes - i * piece));
  });
}

double peak_f32() {
#if defined(__x86_64__)
  std::string_view name = isa().name;
  if (name.starts_with("avx512")) {
    return per_second(f32_avx512);
  }
  if (name == "avx2") {
    return per_second(f32_avx2);
  }
#endif
  return per_second(f32_baseline);
}

double peak_int8() {
#if defined(__x86_64__)
  std::string_view name = isa().name;
#ifdef MLX_GGUF_HAS_AMX
  if (name == "avx512amx") {
    return per_second(int8_amx);
  }
#endif
  if (name == "avx512vnni") {
    return per_second(int8_vnni);
  }
#endif
  return 0;
}

} // namespace mlx_gguf::cpu
