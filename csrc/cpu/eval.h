// The CPU backend's side of the primitives.
#pragma once

#include <vector>

#include "mlx/array.h"
#include "mlx/stream.h"
#include "primitives.h"

namespace mlx_gguf::cpu {

void quantized_matmul(
    const std::vector<array>& inputs,
    array& out,
    const MatmulState& state,
    mx::Stream s);

void gather_qmm(
    const std::vector<array>& inputs,
    array& out,
    const Format& format,
    bool transpose,
    mx::Stream s);

void dequantize(const array& w, array& out, const Format& format, mx::Stream s);

} // namespace mlx_gguf::cpu
