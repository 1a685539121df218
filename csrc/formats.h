// The table of GGUF tensor types. Host code, kernels, loader, tests and
// documentation derive from its rows: adding a type is one row here and one
// decode per backend.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "mlx/dtype.h"

namespace mlx_gguf {

struct Format {
  const char* name; // as GGUF spells it, lower case: "q4_k"
  uint32_t id;      // ggml's type number, stored in files
  int block_size;   // weights in a block; blocks lie along K
  int block_bytes;
  int alignment;  // of a block, when its tensor is aligned
  bool supported; // the ops take it; others can only be inspected
  // Bound on ||y - ref|| / ||ref|| of an f32 product or dequantisation against
  // float64, before rounding to the output's dtype.
  double tolerance;
  // The array dtype of a type stored as plain numbers.
  std::optional<mlx::core::Dtype> plain;

  bool packed() const {
    return !plain.has_value();
  }
  double bits_per_weight() const {
    return 8.0 * block_bytes / block_size;
  }
  // Bytes of a row of K weights; K must be a multiple of block_size.
  int64_t row_bytes(int64_t K) const {
    return K / block_size * block_bytes;
  }
};

// Every type known by name, ordered by id.
std::span<const Format> formats();

// nullptr when there is no such type. Names match in any case.
const Format* find_format(std::string_view name);
const Format* find_format(uint32_t id);

// The row of a type the ops take, or std::invalid_argument that starts with
// `[op]` and names what was given.
const Format& supported_format(std::string_view op, std::string_view name);

} // namespace mlx_gguf
