#include "cpu/product.h"

#include <algorithm>
#include <memory>

#include "cpu/threads.h"

namespace mlx_gguf::cpu {

namespace {

constexpr int64_t rows_per_task = 16; // of weights; a multiple of row_group
constexpr int64_t m_tile = 64; // rows of x a decoded tile of weights meets
constexpr int64_t columns_per_task = 256; // a multiple of every block size
constexpr int64_t n_tile = 64; // weight rows summed before joining the total

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

size_t item_size(Number n) {
  return n == Number::f32 ? 4 : 2;
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

// x as f32 rows, padded with zeros: x itself when it already is.
class Activations {
 public:
  Activations(const void* x, int64_t rows, int64_t width, Number number)
      : stride_(ceil_div(width, x_padding) * x_padding) {
    if (number == Number::f32 && stride_ == width) {
      data_ = static_cast<const float*>(x);
      return;
    }
    copy_.reset(new float[rows * stride_]);
    data_ = copy_.get();
    const Isa& cpu = isa();
    parallel_for(rows, [&](int64_t r) {
      float* row = copy_.get() + r * stride_;
      cpu.to_f32(number, at(x, r * width, number), width, row);
      std::fill(row + width, row + stride_, 0.0f);
    });
  }

  const float* row(int64_t r) const {
    return data_ + r * stride_;
  }

 private:
  int64_t stride_;
  std::unique_ptr<float[]> copy_;
  const float* data_;
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
  const float* pointers[m_tile];
  float y[m_tile][row_group];
  float out[m_tile][rows_per_task];
  for (int64_t m = 0; m < M; ++m) {
    pointers[m] = x.row(rows[m].x);
  }
  int64_t row_bytes = p.format->row_bytes(p.K);
  float* buffer = scratch(product_scratch(M));
  for (int64_t n = n0; n < n1; n += row_group) {
    int64_t count = std::min(row_group, n1 - n);
    type.product(
        w + n * row_bytes, row_bytes, count, p.K, pointers, M, y, buffer);
    for (int64_t m = 0; m < M; ++m) {
      std::copy(y[m], y[m] + count, out[m] + (n - n0));
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

void Product::run(
    const void* x, int64_t x_rows, const std::vector<Group>& groups) const {
  struct Piece {
    const uint8_t* w;
    const Row* rows;
    int64_t M;
  };
  std::vector<Piece> pieces;
  for (const Group& g : groups) {
    int64_t size = static_cast<int64_t>(g.rows.size());
    for (int64_t m = 0; m < size; m += m_tile) {
      pieces.push_back({g.w, &g.rows[m], std::min(m_tile, size - m)});
    }
  }
  TypeKernels type = isa().type(format->id);
  Activations rows(x, x_rows, transpose ? K : N, number);
  int64_t outputs = transpose ? N : K;
  int64_t step = transpose ? rows_per_task : columns_per_task;
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
