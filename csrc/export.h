// Our operations spelled in MLX's own primitives. MLX can only write graphs of
// primitives it knows to a file, so this is what an exported function holds:
// the same packed bytes and the same values, runnable wherever MLX is.
#pragma once

#include <vector>

#include "formats.h"
#include "mlx/array.h"
#include "mlx/utils.h"

namespace mlx_gguf {

namespace mx = mlx::core;

// True on a thread whose operations are to build MLX's primitives.
bool native_ops();
void set_native_ops(bool on);

mx::array native_dequantize(
    const mx::array& w,
    const Format& format,
    mx::Dtype dtype,
    mx::StreamOrDevice s);

// inputs as in QuantizedMatmul and GatherQmm.
mx::array native_matmul(
    const std::vector<mx::array>& inputs,
    const Format& format,
    bool transpose,
    float alpha,
    float beta,
    mx::StreamOrDevice s);
mx::array native_gather(
    const std::vector<mx::array>& inputs,
    const Format& format,
    bool transpose,
    mx::StreamOrDevice s);

} // namespace mlx_gguf
