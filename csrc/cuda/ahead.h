// Kernels made before they are needed.
#pragma once

#include <vector>

#include "cuda/backend.h"

namespace mlx_gguf::cuda {

// As Backend has it.
void compile_ahead(
    const std::vector<Problem>& problems,
    const std::vector<std::string>& functions);

} // namespace mlx_gguf::cuda
