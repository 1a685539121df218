// MLX's own operations inside the evaluation of one of our nodes.
#pragma once

#include <optional>

#include "../primitives.h"

namespace mlx_gguf {

// Keeps a new array until the work enqueued on s is done: each backend's own.
array temporary(array a, mx::Stream s);

// MLX exports no kernels for use inside eval_gpu, only graph nodes. A node
// whose inputs have their data can be evaluated on the spot, as the scheduler
// would. So the path is chosen where M is known for certain, and derivatives,
// vmap, compile and export see one node whichever path it takes.
array evaluate(array node);

// `a` over `shape`, which it broadcasts to, in row order: a temporary of s.
array expanded(const array& a, const mx::Shape& shape, mx::Stream s);

// out = alpha * x @ w.T (or x @ w) + beta * c for every row of x, as MLX
// multiplies in the dtype of w [N, K], to which x and c are converted. Gives
// out its data.
void dense_matmul(
    const array& x,
    const array& w,
    bool transpose,
    const std::optional<array>& c,
    array& out,
    float alpha,
    float beta,
    mx::Stream s);

} // namespace mlx_gguf
