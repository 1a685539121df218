// Rows of x as the kernels want them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "cpu/kernels.h"

namespace mlx_gguf::cpu {

// Memory aligned to 64 bytes.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t bytes)
      : data_(static_cast<std::byte*>(::operator new[](bytes, alignment))) {}
  std::byte* get() const {
    return data_.get();
  }

 private:
  static constexpr std::align_val_t alignment{64};
  struct Free {
    void operator()(std::byte* p) const {
      ::operator delete[](p, alignment);
    }
  };
  std::unique_ptr<std::byte[], Free> data_;
};

size_t item_size(Number number);

// x as f32 rows, padded with zeros to a multiple of x_padding: x itself when it
// already is. For a type with a gemv also in fixed point; `alone` if no two
// rows meet the same weights at once.
class Activations {
 public:
  Activations(
      const void* x,
      int64_t rows,
      int64_t width,
      Number number,
      const TypeKernels* fixed_for,
      bool alone);

  const float* row(int64_t r) const {
    return data_ + r * stride_;
  }

  // The row in fixed point, or nullptr if it has values that are not to be had
  // in it. Which way a row goes depends on its own values alone.
  const void* fixed(int64_t r) const {
    return fixed_.get() && is_fixed_[r] ? fixed_.get() + r * fixed_stride_
                                        : nullptr;
  }

 private:
  int64_t stride_;
  std::unique_ptr<float[]> copy_;
  const float* data_;
  int64_t fixed_stride_ = 0;
  Buffer fixed_;
  std::unique_ptr<bool[]> is_fixed_;
};

// Fixed rows in packs of pack_rows, for TypeKernels::gemm.
class Packs {
 public:
  Packs(
      const std::vector<const void*>& rows, int64_t K, const TypeKernels& type);
  std::vector<const void*> list(int64_t first, int64_t count) const;

 private:
  int64_t stride_;
  Buffer data_;
};

} // namespace mlx_gguf::cpu
