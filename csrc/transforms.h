// Shape work behind the transformations: summing gradients over broadcast axes
// and folding a vmapped axis into the batch.
#pragma once

#include <vector>

#include "mlx/array.h"
#include "mlx/stream.h"

namespace mlx_gguf {

namespace mx = mlx::core;

// factor * a in a's dtype.
mx::array scaled(const mx::array& a, float factor, const mx::Stream& s);

// Sums over the axes along which `shape` was broadcast to a's shape.
mx::array sum_to_shape(
    const mx::array& a, const mx::Shape& shape, const mx::Stream& s);

// Product of all axes but the last two.
int batch_size(const mx::array& a);

// Inputs of a product whose leading axis is the mapped one, and the shape of
// the result without its last axis.
struct Folded {
  std::vector<mx::array> inputs;
  mx::Shape shape;
};

// inputs: x [..., M, K], w [..., N, row_bytes] and optionally c; axes: the
// mapped axis of each, or -1.
Folded fold_product(
    const std::vector<mx::array>& inputs,
    const std::vector<int>& axes,
    const mx::Stream& s);

// inputs: x, w, lhs and rhs indices.
std::vector<mx::array> fold_gather(
    const std::vector<mx::array>& inputs,
    const std::vector<int>& axes,
    const mx::Stream& s);

} // namespace mlx_gguf
