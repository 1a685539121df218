// The operations on Metal: a plan, a kernel, an encoded launch. Every input is
// row-contiguous (see ops.cpp); the work is enqueued on the stream.
#pragma once

#include "../primitives.h"
#include "metal/plan.h"

namespace mlx_gguf::metal {

bool is_available();

// The device as plans see it. The first call runs the self-test; any thread.
const Gpu& gpu();

void quantized_matmul(
    const std::vector<array>& inputs,
    array& out,
    const MatmulState& state,
    mx::Stream s);

// Indices are not checked: the GPU reads them. As MLX's own gather_qmm.
void gather_qmm(
    const std::vector<array>& inputs,
    array& out,
    const Format& format,
    bool transpose,
    bool sorted,
    mx::Stream s);

void dequantize(const array& w, array& out, const Format& format, mx::Stream s);

} // namespace mlx_gguf::metal
