// Tiles of AMX: up to 16 rows of 64 bytes. A product sums bytes of the rows of
// one by those of another, four and four: c[i][j] += a[i][4 k + l] *
// b[k][4 j + l], in whole numbers of 32 bits.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace mlx_gguf::cpu::MLX_GGUF_ISA {
namespace {

// Compilers do not know which memory instructions of tiles read.
inline void finish_stores() {
  __asm__ volatile("" ::: "memory");
}

// While it lives, tiles 0 to 3 are sums of 16 by 16, 4 and 5 have 16 rows of
// `bytes`, and 6 and 7 the `bytes` by 16 that they are multiplied by.
class Tiles {
 public:
  explicit Tiles(int bytes) {
    alignas(64) Shapes shapes{.palette = 1};
    for (int i = 0; i < 8; ++i) {
      shapes.rows[i] = static_cast<uint8_t>(i < 6 ? 16 : bytes / 4);
      shapes.row_bytes[i] =
          static_cast<uint16_t>(i == 4 || i == 5 ? bytes : 64);
    }
    __asm__ volatile("" : "+m"(shapes)); // all of it is read
    _tile_loadconfig(&shapes);
  }
  ~Tiles() {
    _tile_release();
  }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

 private:
  struct Shapes {
    uint8_t palette, start, unused[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
};

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA
