// How a product's operands meet: what the host sides of Metal and CUDA ask of
// shapes before they launch. P is the backend's struct of kernel arguments.
#pragma once

#include <optional>
#include <vector>

#include "../primitives.h"

namespace mlx_gguf {

int64_t ceil_div(int64_t a, int64_t b);

int64_t product(const mx::Shape& axes);

// The batch axes of an array: all but the last two, or none.
mx::Shape batch_axes(const array& a);

// For every entry of batch axes `to`, in row order, which entry of the axes
// `from` broadcasts to it.
array entries(const mx::Shape& from, const mx::Shape& to);

// Of one product with w [..., N, row_bytes].
template <typename P>
P params_of(const array& w, const Format& format) {
  P p{};
  p.N = w.shape(-2);
  p.K = static_cast<uint32_t>(
      w.shape(-1) / format.block_bytes * int64_t{format.block_size});
  p.alpha = p.beta = 1.0f;
  p.w_step = uint64_t{p.N} * static_cast<uint64_t>(w.shape(-1));
  return p;
}

// How the matrices of x and w meet in the output.
struct Batch {
  int64_t M; // rows of each
  int64_t size = 1;
  // Set where the steps of P cannot say it: P::gather. The caller's
  // temporaries.
  std::optional<array> lhs;
  std::optional<array> rhs;
};

// Sets M, gather, x_step and w_step.
template <typename P>
Batch batch_of(const array& x, const array& w, const array& out, P& p) {
  int64_t rows = static_cast<int64_t>(out.size()) / out.shape(-1);
  mx::Shape w_axes = batch_axes(w);
  int64_t w_count = product(w_axes);
  if (w_count == 1) { // all rows of x are rows of one product
    p.M = static_cast<uint32_t>(rows);
    p.w_step = 0;
    return {rows};
  }
  Batch batch{out.shape(-2)};
  batch.size = rows / batch.M;
  mx::Shape x_axes = batch_axes(x);
  int64_t x_count = product(x_axes);
  p.M = static_cast<uint32_t>(batch.M);
  p.x_step = static_cast<uint64_t>(batch.M) * x.shape(-1);
  bool x_even = x_count == 1 || x_count == batch.size;
  if (x_even && w_count == batch.size) {
    p.x_step = x_count == 1 ? 0 : p.x_step;
    return batch;
  }
  mx::Shape axes = batch_axes(out);
  p.gather = 1;
  batch.lhs = entries(x_axes, axes);
  batch.rhs = entries(w_axes, axes);
  return batch;
}

} // namespace mlx_gguf
