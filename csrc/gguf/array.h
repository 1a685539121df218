// Tensors of an open file as MLX arrays.
#pragma once

#include <memory>

#include "gguf/file.h"
#include "mlx/array.h"

namespace mlx_gguf::gguf {

// The tensor's array: uint8 [..., N, row_bytes] of a packed type; its own
// dtype and shape of a plain one. It lies on the file's mapping, which it keeps
// alive and never writes: on the CPU, and on Metal where the device can address
// the pages. It is one copy in MLX's memory elsewhere, and when the data is not
// aligned for its type. `tensor` must be one of file.tensors(). Throws Error
// when it is packed in a type without kernels.
mlx::core::array tensor_array(
    const std::shared_ptr<const File>& file, const TensorInfo& tensor);

} // namespace mlx_gguf::gguf
