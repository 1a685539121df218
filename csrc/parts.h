// One product whose last axis is handed out in parts: a node, where a product
// and a split of it would be two.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "mlx/array.h"
#include "mlx/utils.h"

namespace mlx_gguf {

// x @ W.T + bias, of N numbers or none, as quantized_addmm() has it, cut before
// every one of `ends`, which ascend within N: mx::split of it.
std::vector<mlx::core::array> quantized_matmul_parts(
    const mlx::core::array& x,
    const mlx::core::array& w,
    const std::string& qtype,
    const std::vector<int>& ends,
    const std::optional<mlx::core::array>& bias = std::nullopt,
    mlx::core::StreamOrDevice s = {});

} // namespace mlx_gguf
