// MLX's own operations inside the evaluation of one of our nodes.
#pragma once

#include <optional>

#include "../primitives.h"

namespace mlx_gguf::metal {

// `a` over `shape`, which it broadcasts to, in row order: a temporary of s.
array expanded(const array& a, const mx::Shape& shape, mx::Stream s);

// out = alpha * x @ w.T (or x @ w) + beta * c for every row of x, summed in f32
// and rounded once. x and c in out's dtype; w [N, K] in f32. Gives out its
// data.
void dense_matmul(
    const array& x,
    const array& w,
    bool transpose,
    const std::optional<array>& c,
    array& out,
    float alpha,
    float beta,
    mx::Stream s);

} // namespace mlx_gguf::metal
