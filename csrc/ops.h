// The public operations: validation, shape and dtype inference, graph nodes.
#pragma once

#include <optional>
#include <string>

#include "mlx/array.h"
#include "mlx/utils.h"

namespace mlx_gguf {

namespace mx = mlx::core;

// alpha * x @ W.T (or x @ W when transpose is false).
// x: [..., M, K], f16, bf16 or f32. w: [..., N, row_bytes], uint8. Batch
// dimensions broadcast; a 2-D w serves every row of an x of any rank.
mx::array quantized_matmul(
    const mx::array& x,
    const mx::array& w,
    const std::string& qtype,
    bool transpose = true,
    mx::StreamOrDevice s = {});

// alpha * x @ W.T + beta * c; c broadcasts to the product's shape.
mx::array quantized_addmm(
    const mx::array& c,
    const mx::array& x,
    const mx::array& w,
    const std::string& qtype,
    float alpha = 1.0f,
    float beta = 1.0f,
    bool transpose = true,
    mx::StreamOrDevice s = {});

// The product of x[lhs] and w[rhs] for every pair of indices: a mixture of
// experts. x: [..., M, K], w: [E, N, row_bytes], out: [indices..., M, N].
mx::array gather_qmm(
    const mx::array& x,
    const mx::array& w,
    const std::string& qtype,
    const std::optional<mx::array>& lhs_indices = std::nullopt,
    const std::optional<mx::array>& rhs_indices = std::nullopt,
    bool transpose = true,
    bool sorted_indices = false,
    mx::StreamOrDevice s = {});

// w: [..., row_bytes] -> [..., K].
mx::array dequantize(
    const mx::array& w,
    const std::string& qtype,
    mx::Dtype dtype = mx::float32,
    mx::StreamOrDevice s = {});

} // namespace mlx_gguf
