// The gated delta rule (arXiv:2412.06464), which most layers of Qwen3.5 and
// Qwen3-Next are, as one node of the graph: MLX has a kernel for it on Metal
// alone, and elsewhere goes token by token through a dozen operations.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "mlx/array.h"
#include "mlx/utils.h"

namespace mlx_gguf {

namespace mx = mlx::core;
using mlx::core::array;

// For every head, whose S is its state:
//   S' = g S + beta (v - g S k) k^T,  y = S' q
// token by token; where mask is false the token changes nothing and its y is 0.
// Returns y and the last states.
//
// q, k [B, T, Hk, D], v [B, T, Hv, R], g (f32) and beta [B, T, Hv], state (f32)
// [B, Hv, R, D], mask [B, T]; head h of v has head h / (Hv / Hk) of q and k.
// Nothing where no kernel takes them.
std::optional<std::pair<array, array>> gated_delta(
    const array& q,
    const array& k,
    const array& v,
    const array& g,
    const array& beta,
    const array& state,
    const std::optional<array>& mask,
    mx::StreamOrDevice s = {});

// What kernels are made for: D a multiple of delta_width up to most_delta_width
// and R of delta_rows.
constexpr int delta_width = 32, most_delta_width = 256, delta_rows = 16;

// Sizes of a call, of its inputs in their order.
struct DeltaShape {
  int batch, tokens, key_heads, heads, rows, width;
  explicit DeltaShape(const std::vector<array>& inputs)
      : batch(inputs[2].shape(0)),
        tokens(inputs[2].shape(1)),
        key_heads(inputs[1].shape(2)),
        heads(inputs[2].shape(2)),
        rows(inputs[2].shape(3)),
        width(inputs[1].shape(3)) {}
};

// Each backend's evaluation; outputs are y and the states.
using DeltaFunction = void(
    const std::vector<array>& inputs,
    std::vector<array>& outputs,
    mx::Stream s);
namespace cpu {
DeltaFunction gated_delta;
}
namespace cuda {
DeltaFunction gated_delta; // in the shared object: cuda/backend.h
}

} // namespace mlx_gguf
