// Runs the kernels of one instruction set on cases from standard input and
// writes what they give to standard output; without arguments, the instruction
// sets of the processor. Needs libc alone: a C++ library for another processor
// takes minutes to build.
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cpu/arm_features.h"
#include "cpu/kernels.h"

namespace mlx_gguf::cpu {
extern const Isa isa_portable, isa_neon, isa_neon_dotprod;
}

using namespace mlx_gguf::cpu;

namespace {

// As test_arm.py writes them; weights and x follow.
struct Case {
  int32_t type, size, bytes; // of a block
  int32_t N, K, M;
  float tolerance;
};

constexpr int64_t few[] = {1, 2, 3, 8};
constexpr int64_t many[] = {9, 33};

void read(void* to, int64_t bytes) {
  if (fread(to, 1, bytes, stdin) != static_cast<size_t>(bytes)) {
    fputs("Expected a whole case.\n", stderr);
    exit(1);
  }
}

template <typename T>
void write(const T* from, int64_t count) {
  fwrite(from, sizeof(T), count, stdout);
}

// Memory that ends where the process may not read on, or that is aligned to a
// page.
uint8_t* memory(int64_t bytes, bool at_end) {
  constexpr int64_t page = 1 << 16; // of any Arm kernel
  int64_t whole = (bytes + page - 1) / page * page;
  void* p = mmap(
      nullptr,
      whole + page,
      PROT_READ | PROT_WRITE,
      MAP_PRIVATE | MAP_ANONYMOUS,
      -1,
      0);
  auto start = static_cast<uint8_t*>(p);
  if (p == MAP_FAILED || mprotect(start + whole, page, PROT_NONE) != 0) {
    fputs("Expected memory.\n", stderr);
    exit(1);
  }
  return at_end ? start + whole - bytes : start;
}

template <typename T>
T* array(int64_t count) {
  return reinterpret_cast<T*>(memory(count * sizeof(T), false));
}

// Everything but what is packed in x is made once for a case; the process ends
// before that is much.
struct Run {
  const Isa& isa;
  Case c;
  TypeKernels type;
  const uint8_t* w;
  int64_t row_bytes;
  float** x;
  void** fixed;
  float* y; // [M][N]

  void product(int64_t M) {
    static float scratch[product_scratch(64)], part[64][row_group];
    for (int64_t n = 0; n < c.N; n += row_group) {
      int64_t count = c.N - n < row_group ? c.N - n : row_group;
      const uint8_t* rows = w + n * row_bytes;
      type.product(rows, row_bytes, count, c.K, x, M, part, scratch);
      for (int64_t m = 0; m < M; ++m) {
        memcpy(y + m * c.N + n, part[m], sizeof(float) * count);
      }
    }
    write(y, M * c.N);
  }

  void gemv(int64_t M) {
    type.gemv(w, row_bytes, c.N, c.K, fixed, M, y, c.N);
    write(y, M * c.N);
  }

  void gemm(int64_t M) {
    int64_t vectors = (M + pack_rows - 1) / pack_rows;
    const void* packs[8];
    for (int64_t v = 0; v < vectors; ++v) {
      const void* rows[pack_rows] = {};
      for (int64_t i = 0; i < pack_rows && v * pack_rows + i < M; ++i) {
        rows[i] = fixed[v * pack_rows + i];
      }
      void* pack = array<char>(isa.packed_bytes(c.K));
      isa.pack(rows, c.K, type, pack);
      packs[v] = pack;
    }
    int64_t width = vectors * pack_rows;
    float* tile = array<float>((isa.gemm_rows + isa.gemm_unit) * width);
    for (int64_t n = 0; n < c.N; n += isa.gemm_rows) {
      int64_t count = c.N - n < isa.gemm_rows ? c.N - n : isa.gemm_rows;
      type.gemm(w + n * row_bytes, row_bytes, count, c.K, packs, vectors, tile);
      for (int64_t m = 0; m < M; ++m) {
        for (int64_t r = 0; r < count; ++r) {
          y[m * c.N + n + r] = tile[r * width + m];
        }
      }
    }
    write(y, M * c.N);
  }
};

void run(const Isa& isa, const Case& c) {
  int64_t row_bytes = int64_t(c.K / c.size) * c.bytes;
  uint8_t* w = memory(c.N * row_bytes, true);
  read(w, c.N * row_bytes);
  int64_t padded = (c.K + x_padding - 1) / x_padding * x_padding;
  float* x[64];
  void* fixed[64];
  TypeKernels type = isa.type(c.type);
  bool all_fixed = type.gemv != nullptr;
  for (int64_t m = 0; m < c.M; ++m) {
    x[m] = array<float>(padded);
    read(x[m], sizeof(float) * c.K);
    int32_t is_fixed = 0;
    if (type.gemv) {
      fixed[m] = array<char>(isa.fixed_bytes(c.K));
      is_fixed = isa.fix(x[m], c.K, type, c.tolerance, false, fixed[m]);
    }
    all_fixed = all_fixed && is_fixed;
    write(&is_fixed, 1);
  }
  float* weights = array<float>(int64_t(c.N) * c.K);
  type.decode(w, int64_t(c.N) * c.K / c.size, weights);
  write(weights, int64_t(c.N) * c.K);
  float* y = array<float>(int64_t(c.M) * c.N);
  Run r{isa, c, type, w, row_bytes, x, fixed, y};
  for (int64_t M : few) {
    r.product(M);
    if (all_fixed) {
      r.gemv(M);
    }
  }
  for (int64_t M : many) {
    r.product(M);
    if (all_fixed) {
      r.gemm(M);
    }
  }
}

} // namespace

int main(int argc, char** argv) {
  const Isa* isas[] = {&isa_neon_dotprod, &isa_neon, &isa_portable};
  for (const Isa* isa : isas) {
    if (isa == &isa_neon_dotprod && !has_dotprod()) {
      continue;
    }
    if (argc < 2) {
      puts(isa->name);
    } else if (strcmp(isa->name, argv[1]) == 0) {
      Case c;
      while (fread(&c, sizeof(c), 1, stdin) == 1) {
        run(*isa, c);
      }
      return 0;
    }
  }
  return argc < 2 ? 0 : 1;
}
