// A step on CUDA: the backend's entry.
#pragma once

#include <memory>

#include "../step.h"

namespace mlx_gguf::cuda {

void step(
    const array& x,
    array& out,
    const std::shared_ptr<History>& history,
    int position,
    mx::Stream s);

} // namespace mlx_gguf::cuda
