#include "transforms.h"

#include <algorithm>

#include "mlx/ops.h"

namespace mlx_gguf {

namespace {

using mx::array;

// The size of the mapped axis.
int mapped_size(
    const std::vector<array>& inputs, const std::vector<int>& axes) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (axes[i] >= 0) {
      return inputs[i].shape(axes[i]);
    }
  }
  return 1;
}

array to_front(const array& a, int axis, const mx::Stream& s) {
  return axis > 0 ? mx::moveaxis(a, axis, 0, s) : a;
}

// Puts the mapped axis (or an axis of one) first and pads with ones behind it,
// so that the remaining axes line up at the right in `rank` axes.
array lead(const array& a, int axis, size_t rank, const mx::Stream& s) {
  array front = to_front(a, axis, s);
  mx::Shape shape{axis >= 0 ? front.shape(0) : 1};
  size_t skip = axis >= 0 ? 1 : 0;
  size_t rest = front.ndim() - skip;
  shape.resize(1 + rank - rest, 1);
  shape.insert(shape.end(), front.shape().begin() + skip, front.shape().end());
  return mx::reshape(front, shape, s);
}

} // namespace

array scaled(const array& a, float factor, const mx::Stream& s) {
  return factor == 1.0f ? a : mx::multiply(a, array(factor, a.dtype()), s);
}

array sum_to_shape(
    const array& a, const mx::Shape& shape, const mx::Stream& s) {
  if (a.shape() == shape) {
    return a;
  }
  int extra = static_cast<int>(a.ndim() - shape.size());
  std::vector<int> axes;
  for (int i = 0; i < static_cast<int>(a.ndim()); ++i) {
    if (i < extra || shape[i - extra] != a.shape(i)) {
      axes.push_back(i);
    }
  }
  return mx::reshape(mx::sum(a, axes, false, s), shape, s);
}

int batch_size(const array& a) {
  int size = 1;
  for (size_t i = 0; i + 2 < a.ndim(); ++i) {
    size *= a.shape(i);
  }
  return size;
}

Folded fold_product(
    const std::vector<array>& inputs,
    const std::vector<int>& axes,
    const mx::Stream& s) {
  int size = mapped_size(inputs, axes);
  auto rank = [&](size_t i) { return inputs[i].ndim() - (axes[i] >= 0); };
  // A vector counts as one row: the fold needs a row axis to keep batches in
  // front of it. Rank of the product without the mapped axis:
  size_t full = std::max<size_t>({2, rank(0), rank(1)});

  Folded folded;
  array x = lead(inputs[0], axes[0], full, s);
  bool only_c = axes[0] < 0 && axes[1] < 0;
  if (only_c) {
    mx::Shape shape = x.shape();
    shape[0] = size;
    x = mx::broadcast_to(x, shape, s);
  }
  bool one_w = axes[1] < 0 && inputs[1].ndim() == 2;
  array w = one_w ? inputs[1] : lead(inputs[1], axes[1], full, s);
  folded.inputs = {x, w};
  if (inputs.size() == 3) {
    folded.inputs.push_back(lead(inputs[2], axes[2], full, s));
  }

  mx::Shape batch(x.shape().begin(), x.shape().end() - 2);
  if (!one_w) {
    mx::Shape w_batch(w.shape().begin(), w.shape().end() - 2);
    batch = mx::broadcast_shapes(batch, w_batch);
  }
  folded.shape = batch;
  if (rank(0) > 1) {
    folded.shape.push_back(x.shape(-2));
  }
  return folded;
}

std::vector<array> fold_gather(
    const std::vector<array>& inputs,
    const std::vector<int>& axes,
    const mx::Stream& s) {
  int size = mapped_size(inputs, axes);
  array x = to_front(inputs[0], axes[0], s);
  array w = to_front(inputs[1], axes[1], s);
  array lhs = to_front(inputs[2], axes[2], s);
  array rhs = to_front(inputs[3], axes[3], s);

  // Each mapped copy of x or w lies behind the previous one: shift its indices.
  auto shift = [&](array indices, bool mapped, bool shifted, int stride) {
    if (!mapped) {
      indices = mx::expand_dims(indices, 0, s);
    }
    if (shifted) {
      mx::Shape shape(indices.ndim(), 1);
      shape[0] = size;
      array offsets = mx::multiply(
          mx::arange(0, size, mx::uint32, s), array(stride, mx::uint32), s);
      // An index out of range must not become one of another copy.
      indices = mx::where(
          mx::less(indices, array(stride, mx::uint32), s),
          mx::add(indices, mx::reshape(offsets, shape, s), s),
          array(UINT32_MAX, mx::uint32),
          s);
    }
    mx::Shape shape = indices.shape();
    shape[0] = size;
    return mx::broadcast_to(indices, shape, s);
  };
  int per_x = axes[0] >= 0 ? batch_size(x) / std::max(size, 1) : 0;
  int per_w = axes[1] >= 0 ? w.shape(1) : 0;
  if (axes[1] >= 0) {
    w = mx::flatten(w, 0, 1, s);
  }
  return {
      x,
      w,
      shift(lhs, axes[2] >= 0, axes[0] >= 0, per_x),
      shift(rhs, axes[3] >= 0, axes[1] >= 0, per_w)};
}

} // namespace mlx_gguf
