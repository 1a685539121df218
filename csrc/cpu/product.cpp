#include "cpu/product.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <new>

#include "cpu/plan.h"
#include "cpu/threads.h"
#include "tuned.h"

namespace mlx_gguf::cpu {

namespace {

constexpr int64_t m_tile = 64; // rows of x a decoded tile of weights meets
constexpr int64_t columns_per_task = 256; // a multiple of every block size
constexpr int64_t n_tile = 64; // weight rows summed before joining the total

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

size_t item_size(Number n) {
  return n == Number::f32 ? 4 : 2;
}

mlx::core::Dtype dtype_of(Number n) {
  return n == Number::f16    ? mlx::core::float16
         : n == Number::bf16 ? mlx::core::bfloat16
                             : mlx::core::float32;
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

// x as f32 rows, padded with zeros: x itself when it already is. With `fixed`
// also in fixed point.
class Activations {
 public:
  Activations(
      const void* x, int64_t rows, int64_t width, Number number, bool fixed)
      : stride_(ceil_div(width, x_padding) * x_padding) {
    bool in_place = number == Number::f32 && stride_ == width;
    if (!in_place) {
      copy_.reset(new float[rows * stride_]);
    }
    data_ = in_place ? static_cast<const float*>(x) : copy_.get();
    const Isa& cpu = isa();
    if (fixed) {
      fixed_stride_ = cpu.fixed_bytes(width);
      fixed_.reset(new (alignment) std::byte[rows * fixed_stride_]);
      is_fixed_.reset(new bool[rows]);
    }
    parallel_for(in_place && !fixed ? 0 : rows, [&](int64_t r) {
      if (!in_place) {
        float* row = copy_.get() + r * stride_;
        cpu.to_f32(number, at(x, r * width, number), width, row);
        std::fill(row + width, row + stride_, 0.0f);
      }
      if (fixed) {
        is_fixed_[r] = cpu.fix(row(r), width, fixed_.get() + r * fixed_stride_);
      }
    });
  }

  const float* row(int64_t r) const {
    return data_ + r * stride_;
  }

  // The row in fixed point, or nullptr.
  const void* fixed(int64_t r) const {
    return fixed_ && is_fixed_[r] ? fixed_.get() + r * fixed_stride_ : nullptr;
  }

 private:
  static constexpr std::align_val_t alignment{64};
  struct Free {
    void operator()(std::byte* p) const {
      ::operator delete[](p, alignment);
    }
  };

  int64_t stride_;
  std::unique_ptr<float[]> copy_;
  const float* data_;
  int64_t fixed_stride_ = 0;
  std::unique_ptr<std::byte[], Free> fixed_;
  std::unique_ptr<bool[]> is_fixed_;
};

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

// x @ W.T: weight rows [n0, n1) against some rows of x.
void rows_task(
    const Product& p,
    const TypeKernels& type,
    const Activations& x,
    const uint8_t* w,
    const Row* rows,
    int64_t M,
    int64_t n0,
    int64_t n1) {
  // Rows that are in fixed point, and the others. Which way a row goes depends
  // on its own values alone.
  const void* fixed[m_tile];
  const float* plain[m_tile];
  int64_t fixed_at[m_tile], plain_at[m_tile];
  int64_t n_fixed = 0, n_plain = 0;
  for (int64_t m = 0; m < M; ++m) {
    if (const void* row = x.fixed(rows[m].x)) {
      fixed_at[n_fixed] = m;
      fixed[n_fixed++] = row;
    } else {
      plain_at[n_plain] = m;
      plain[n_plain++] = x.row(rows[m].x);
    }
  }
  float y[m_tile][row_group];
  float out[m_tile][task_rows.back()];
  int64_t row_bytes = p.format->row_bytes(p.K);
  float* buffer = n_plain ? scratch(product_scratch(n_plain)) : nullptr;
  for (int64_t n = n0; n < n1; n += row_group) {
    int64_t count = std::min(row_group, n1 - n);
    const uint8_t* weights = w + n * row_bytes;
    auto keep = [&](const int64_t* places, int64_t rows_done) {
      for (int64_t m = 0; m < rows_done; ++m) {
        std::copy(y[m], y[m] + count, out[places[m]] + (n - n0));
      }
    };
    if (n_fixed) {
      type.gemv(weights, row_bytes, count, p.K, fixed, n_fixed, y);
      keep(fixed_at, n_fixed);
    }
    if (n_plain) {
      type.product(weights, row_bytes, count, p.K, plain, n_plain, y, buffer);
      keep(plain_at, n_plain);
    }
  }
  for (int64_t m = 0; m < M; ++m) {
    finish(p, rows[m], n0, n1 - n0, out[m]);
  }
}

// x @ W: columns [k0, k1) of W against some rows of x.
void columns_task(
    const Product& p,
    const TypeKernels& type,
    const Activations& x,
    const uint8_t* w,
    const Row* rows,
    int64_t M,
    int64_t k0,
    int64_t k1) {
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
          w + n * row_bytes + p.format->row_bytes(k0),
          width / p.format->block_size,
          weights);
      for (int64_t m = 0; m < M; ++m) {
        isa().axpy(x.row(rows[m].x)[n], weights, width, part + m * width);
      }
    }
    isa().axpy(1.0f, part, M * width, total);
  }
  for (int64_t m = 0; m < M; ++m) {
    finish(p, rows[m], k0, width, total + m * width);
  }
}

} // namespace

int64_t Product::rows_per_task(const std::vector<Group>& groups) const {
  if (groups.empty()) {
    return default_task_rows;
  }
  int64_t M = static_cast<int64_t>(groups[0].rows.size()); // as good as any
  return tuned_or(choose(N), Backend::cpu, *format, dtype_of(number), M, N, K)
      .rows;
}

void Product::run(
    const void* x, int64_t x_rows, const std::vector<Group>& groups) const {
  struct Piece {
    const uint8_t* w;
    const Row* rows;
    int64_t M;
  };
  TypeKernels type = isa().type(format->id);
  bool fixed = transpose && type.gemv;
  int64_t most = fixed ? max_fixed_rows : m_tile;
  std::vector<Piece> pieces;
  for (const Group& g : groups) {
    int64_t size = static_cast<int64_t>(g.rows.size());
    for (int64_t m = 0; m < size; m += most) {
      pieces.push_back({g.w, &g.rows[m], std::min(most, size - m)});
    }
  }
  Activations rows(x, x_rows, transpose ? K : N, number, fixed);
  int64_t outputs = transpose ? N : K;
  int64_t step = transpose ? rows_per_task(groups) : columns_per_task;
  int64_t tasks = ceil_div(outputs, step);
  // Pieces of one group follow each other within a range of weights, so that
  // the range is read from memory once.
  parallel_for(tasks * static_cast<int64_t>(pieces.size()), [&](int64_t i) {
    const Piece& piece = pieces[i % pieces.size()];
    int64_t begin = i / pieces.size() * step;
    int64_t end = std::min(begin + step, outputs);
    auto task = transpose ? rows_task : columns_task;
    task(*this, type, rows, piece.w, piece.rows, piece.M, begin, end);
  });
}

} // namespace mlx_gguf::cpu
