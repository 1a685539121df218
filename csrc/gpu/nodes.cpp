#include "gpu/nodes.h"

#include "mlx/ops.h"

namespace mlx_gguf {

namespace {

array as_dtype(const array& a, mx::Dtype dtype, mx::Stream s) {
  return a.dtype() == dtype ? a
                            : temporary(evaluate(mx::astype(a, dtype, s)), s);
}

// The buffer of a under another shape.
array view(const array& a, mx::Shape shape, mx::Strides strides) {
  array out(std::move(shape), a.dtype(), nullptr, {});
  bool dense = out.strides() == strides && out.size() == a.data_size();
  out.copy_shared_buffer(
      a,
      strides,
      {.contiguous = dense, .row_contiguous = dense, .col_contiguous = false},
      a.data_size());
  return out;
}

array rows_of(const array& a, int columns) {
  int rows = static_cast<int>(a.size() / columns);
  return view(a, {rows, columns}, {columns, 1});
}

array broadcast(const array& a, const mx::Shape& shape) {
  mx::Strides strides(shape.size(), 0);
  size_t shift = shape.size() - a.ndim();
  for (size_t i = 0; i < a.ndim(); ++i) {
    strides[shift + i] = a.shape(i) == 1 ? 0 : a.strides()[i];
  }
  return view(a, shape, std::move(strides));
}

} // namespace

array evaluate(array node) {
  std::vector<array> outputs{node};
  node.primitive().eval_gpu(node.inputs(), outputs);
  return node;
}

array expanded(const array& a, const mx::Shape& shape, mx::Stream s) {
  return temporary(evaluate(mx::contiguous(broadcast(a, shape), false, s)), s);
}

void dense_matmul(
    const array& x,
    const array& w,
    bool transpose,
    const std::optional<array>& c,
    array& out,
    float alpha,
    float beta,
    mx::Stream s) {
  mx::Dtype dtype = w.dtype();
  int N = w.shape(0), K = w.shape(1);
  int width = transpose ? K : N, outputs = transpose ? N : K;
  array a = as_dtype(rows_of(x, width), dtype, s);
  array b = transpose ? view(w, {K, N}, {1, K}) : w;

  std::optional<array> y;
  if (c || alpha != 1.0f) {
    // An addmm with beta 0 is how MLX applies alpha without a c.
    array term = c ? as_dtype(*c, dtype, s) : temporary(array(0.0f, dtype), s);
    if (term.ndim() > 1) {
      bool whole = term.size() == out.size();
      term = rows_of(whole ? term : expanded(term, out.shape(), s), outputs);
    }
    term = broadcast(term, {a.shape(0), outputs});
    y = evaluate(mx::addmm(term, a, b, alpha, c ? beta : 0.0f, s));
  } else {
    y = evaluate(mx::matmul(a, b, s));
  }
  if (out.dtype() != dtype) {
    y = evaluate(mx::astype(temporary(*y, s), out.dtype(), s));
  }
  out.copy_shared_buffer(*y, out.strides(), y->flags(), y->data_size());
}

} // namespace mlx_gguf
