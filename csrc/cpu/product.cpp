#include "cpu/product.h"

#include <algorithm>
#include <functional>
#include <memory>

#include "cpu/activations.h"
#include "cpu/numbers.h"
#include "cpu/plan.h"
#include "cpu/threads.h"
#include "tuned.h"

namespace mlx_gguf::cpu {

namespace {

constexpr int64_t m_tile = 64; // rows of x a decoded tile of weights meets
constexpr int64_t columns_per_task = 256; // a multiple of every block size
constexpr int64_t n_tile = 64; // weight rows summed before joining the total
constexpr int64_t gemm_m_tile = 128; // rows of x whose packs stay in a cache

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Scratch that a thread keeps and grows.
float* scratch(int64_t floats) {
  thread_local std::unique_ptr<float[]> buffer;
  thread_local int64_t size = 0;
  if (size < floats) {
    buffer.reset(new float[floats]);
    size = floats;
  }
  return buffer.get();
}

const char* at(const void* p, int64_t i, Number n) {
  return static_cast<const char*>(p) + i * item_size(n);
}

char* at(void* p, int64_t i, Number n) {
  return static_cast<char*>(p) + i * item_size(n);
}

// y[n..n+count) = alpha * acc + beta * c, rounded once.
void finish(
    const Product& p, const Row& row, int64_t n, int64_t count, float* acc) {
  if (p.alpha != 1.0f) {
    for (int64_t i = 0; i < count; ++i) {
      acc[i] *= p.alpha;
    }
  }
  if (row.c) {
    float c[columns_per_task];
    int64_t step = p.c_scalar ? 0 : 1;
    isa().to_f32(p.number, at(row.c, n * step, p.number), step ? count : 1, c);
    for (int64_t i = 0; i < count; ++i) {
      acc[i] += p.beta * c[i * step];
    }
  }
  isa().from_f32(p.number, acc, count, at(row.y, n, p.number));
}

// Rows of x that meet the same matrix in the same way.
struct Piece {
  const uint8_t* w;
  std::vector<Row> rows;
};

// x @ W.T for weight rows [n0, n1).
using Task = std::function<void(int64_t n0, int64_t n1)>;

// In f32, for at most m_tile rows.
Task plain_task(
    const Product& p,
    const TypeKernels& type,
    const Activations& x,
    Piece piece) {
  return [&p, &type, &x, piece = std::move(piece)](int64_t n0, int64_t n1) {
    int64_t M = static_cast<int64_t>(piece.rows.size());
    const float* rows[m_tile];
    for (int64_t m = 0; m < M; ++m) {
      rows[m] = x.row(piece.rows[m].x);
    }
    float y[m_tile][row_group];
    float out[m_tile][task_rows.back()];
    int64_t row_bytes = p.format->row_bytes(p.K);
    float* buffer = scratch(product_scratch(M));
    for (int64_t n = n0; n < n1; n += row_group) {
      int64_t count = std::min(row_group, n1 - n);
      const uint8_t* w = piece.w + n * row_bytes;
      type.product(w, row_bytes, count, p.K, rows, M, y, buffer);
      for (int64_t m = 0; m < M; ++m) {
        std::copy(y[m], y[m] + count, out[m] + (n - n0));
      }
    }
    for (int64_t m = 0; m < M; ++m) {
      finish(p, piece.rows[m], n0, n1 - n0, out[m]);
    }
  };
}

// In fixed point, for at most max_fixed_rows rows.
Task gemv_task(
    const Product& p,
    const TypeKernels& type,
    const Activations& x,
    Piece piece) {
  return [&p, &type, &x, piece = std::move(piece)](int64_t n0, int64_t n1) {
    int64_t M = static_cast<int64_t>(piece.rows.size());
    const void* rows[max_fixed_rows];
    for (int64_t m = 0; m < M; ++m) {
      rows[m] = x.fixed(piece.rows[m].x);
    }
    float out[max_fixed_rows][task_rows.back()];
    int64_t row_bytes = p.format->row_bytes(p.K);
    const uint8_t* w = piece.w + n0 * row_bytes;
    type.gemv(w, row_bytes, n1 - n0, p.K, rows, M, out[0], task_rows.back());
    for (int64_t m = 0; m < M; ++m) {
      finish(p, piece.rows[m], n0, n1 - n0, out[m]);
    }
  };
}

// In fixed point, for at most gemm_m_tile rows, which packs hold in this order.
Task gemm_task(
    const Product& p,
    const TypeKernels& type,
    std::vector<const void*> packs,
    Piece piece) {
  return [&p, &type, packs = std::move(packs), piece = std::move(piece)](
             int64_t n0, int64_t n1) {
    int64_t vectors = static_cast<int64_t>(packs.size());
    int64_t width = vectors * pack_rows;
    int64_t row_bytes = p.format->row_bytes(p.K);
    float* y = scratch((n1 - n0 + isa().gemm_unit) * width);
    const uint8_t* w = piece.w + n0 * row_bytes;
    type.gemm(w, row_bytes, n1 - n0, p.K, packs.data(), vectors, y);
    float out[pack_rows][most_gemm_rows];
    int64_t M = static_cast<int64_t>(piece.rows.size());
    for (int64_t m = 0; m < M; m += pack_rows) {
      for (int64_t n = 0; n < n1 - n0; ++n) {
        for (int64_t i = 0; i < pack_rows; ++i) {
          out[i][n] = y[n * width + m + i];
        }
      }
      for (int64_t i = 0; i < std::min(pack_rows, M - m); ++i) {
        finish(p, piece.rows[m + i], n0, n1 - n0, out[i]);
      }
    }
  };
}

// x @ W: columns [k0, k1) of W against some rows of x.
void columns_task(
    const Product& p,
    const TypeKernels& type,
    const Activations& x,
    const Piece& piece,
    int64_t k0,
    int64_t k1) {
  int64_t M = static_cast<int64_t>(piece.rows.size());
  int64_t width = k1 - k0;
  int64_t row_bytes = p.format->row_bytes(p.K);
  float* total = scratch((2 * M + 1) * width);
  float* part = total + M * width;
  float* weights = part + M * width;
  std::fill(total, part, 0.0f);
  for (int64_t n0 = 0; n0 < p.N; n0 += n_tile) {
    std::fill(part, weights, 0.0f);
    for (int64_t n = n0; n < std::min(n0 + n_tile, p.N); ++n) {
      type.decode(
          piece.w + n * row_bytes + p.format->row_bytes(k0),
          width / p.format->block_size,
          weights);
      for (int64_t m = 0; m < M; ++m) {
        isa().axpy(x.row(piece.rows[m].x)[n], weights, width, part + m * width);
      }
    }
    isa().axpy(1.0f, part, M * width, total);
  }
  for (int64_t m = 0; m < M; ++m) {
    finish(p, piece.rows[m], k0, width, total + m * width);
  }
}

// Weight rows of a gemm task: whole tiles, but enough tasks for all threads.
int64_t gemm_rows_per_task(int64_t N) {
  int64_t share = ceil_div(N, 4 * num_threads());
  int64_t unit = isa().gemm_unit;
  return std::clamp(ceil_div(share, unit) * unit, unit, isa().gemm_rows);
}

// Pieces of at most `most` rows.
template <typename F>
void cut(const Piece& all, int64_t most, F&& use) {
  int64_t size = static_cast<int64_t>(all.rows.size());
  for (int64_t m = 0; m < size; m += most) {
    auto first = all.rows.begin() + m;
    use(Piece{all.w, {first, first + std::min(most, size - m)}});
  }
}

} // namespace

int64_t Product::rows_per_task(const std::vector<Group>& groups) const {
  if (groups.empty()) {
    return task_rows[0];
  }
  int64_t M = static_cast<int64_t>(groups[0].rows.size()); // as good as any
  return tuned_or(
             choose(N, num_threads()),
             Backend::cpu,
             *format,
             dtype_of(number),
             M,
             N,
             K)
      .rows;
}

void Product::run_rows(
    const Activations& x,
    const TypeKernels& type,
    const std::vector<Group>& groups) const {
  struct Job {
    Task task;
    int64_t step;  // weight rows at a time
    int64_t first; // of all steps
  };
  std::vector<Job> jobs;
  std::vector<Packs> packs;
  int64_t steps = 0;
  auto add = [&](Task task, int64_t step) {
    jobs.push_back({std::move(task), step, steps});
    steps += ceil_div(N, step);
  };
  int64_t few_step = rows_per_task(groups), many_step = gemm_rows_per_task(N);
  for (const Group& g : groups) {
    Piece fixed{g.w, {}}, plain{g.w, {}};
    for (const Row& row : g.rows) {
      (x.fixed(row.x) ? fixed : plain).rows.push_back(row);
    }
    cut(plain, m_tile, [&](Piece piece) {
      add(plain_task(*this, type, x, std::move(piece)), few_step);
    });
    int64_t count = static_cast<int64_t>(fixed.rows.size());
    if (count == 0) {
      continue;
    }
    // By all rows of the group: one that is not in fixed point must not change
    // the way of the others.
    if (static_cast<int64_t>(g.rows.size()) <= max_fixed_rows) {
      add(gemv_task(*this, type, x, std::move(fixed)), few_step);
      continue;
    }
    std::vector<const void*> rows;
    for (const Row& row : fixed.rows) {
      rows.push_back(x.fixed(row.x));
    }
    packs.emplace_back(rows, K, type);
    int64_t first = 0;
    cut(fixed, gemm_m_tile, [&](Piece piece) {
      int64_t n = ceil_div(static_cast<int64_t>(piece.rows.size()), pack_rows);
      auto list = packs.back().list(first, n);
      add(gemm_task(*this, type, std::move(list), std::move(piece)), many_step);
      first += n;
    });
  }
  parallel_for(steps, [&](int64_t i) {
    auto after = std::upper_bound(
        jobs.begin(), jobs.end(), i, [](int64_t i, const Job& job) {
          return i < job.first;
        });
    const Job& job = *(after - 1);
    int64_t n0 = (i - job.first) * job.step;
    job.task(n0, std::min(n0 + job.step, N));
  });
}

void Product::run_columns(
    const Activations& x,
    const TypeKernels& type,
    const std::vector<Group>& groups) const {
  std::vector<Piece> pieces;
  for (const Group& g : groups) {
    cut({g.w, g.rows}, m_tile, [&](Piece piece) {
      pieces.push_back(std::move(piece));
    });
  }
  int64_t tasks = ceil_div(K, columns_per_task);
  int64_t count = static_cast<int64_t>(pieces.size());
  // Pieces follow each other within a range of weights, so that the range is
  // read from memory once.
  parallel_for(tasks * count, [&](int64_t i) {
    int64_t k0 = i / count * columns_per_task;
    int64_t k1 = std::min(k0 + columns_per_task, K);
    columns_task(*this, type, x, pieces[i % count], k0, k1);
  });
}

void Product::run(
    const void* x, int64_t x_rows, const std::vector<Group>& groups) const {
  TypeKernels type = isa().type(format->id);
  bool fixed = transpose && type.gemv;
  bool alone = std::all_of(groups.begin(), groups.end(), [](const Group& g) {
    return g.rows.size() == 1;
  });
  Activations rows(
      x, x_rows, transpose ? K : N, number, fixed ? &type : nullptr, alone);
  if (transpose) {
    run_rows(rows, type, groups);
  } else {
    run_columns(rows, type, groups);
  }
}

} // namespace mlx_gguf::cpu
