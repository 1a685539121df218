// One product whose last axis is handed out in parts: a node, where a product
// and a split of it would be two.
#pragma once

#include <string>
#include <vector>

#include "mlx/array.h"
#include "mlx/utils.h"

namespace mlx_gguf {

// x @ W.T as quantized_matmul() has it, cut before every one of `ends`, which
// ascend within N: mx::split of it.
std::vector<mlx::core::array> quantized_matmul_parts(
    const mlx::core::array& x,
    const mlx::core::array& w,
    const std::string& qtype,
    const std::vector<int>& ends,
    mlx::core::StreamOrDevice s = {});

} // namespace mlx_gguf
