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
// aligned for its type; with CUDA in the GPU's own, made when the array is
// evaluated if `later`. `tensor` must be one of file.tensors(). Throws Error
// when it is packed in a type without kernels.
mlx::core::array tensor_array(
    const std::shared_ptr<const File>& file,
    const TensorInfo& tensor,
    bool later = false);

// Gives the resident pages of an evaluated array on a mapped file back to the
// system; they are read again when they are used. Does nothing to other arrays.
void release_pages(const mlx::core::array& a);

} // namespace mlx_gguf::gguf
