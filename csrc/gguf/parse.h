// The header of one GGUF file, checked completely before anything is used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats.h"
#include "gguf/value.h"

namespace mlx_gguf::gguf {

struct Entry {
  std::string key;
  Value value;
};

struct TensorInfo {
  std::string name;
  const Format* format;
  std::vector<int32_t> shape; // of the weights, in MLX order: K last
  uint64_t nbytes;
  uint64_t offset;    // of the data from the start of its file
  uint32_t shard = 0; // index of its file in the set
};

struct Header {
  uint32_t version;
  uint64_t alignment;
  std::vector<Entry> metadata;     // in the file's order
  std::vector<TensorInfo> tensors; // in the file's order
};

// Throws Error, with `path` as the file's name, unless every length, offset
// and tensor lies within `bytes`. Takes time and memory linear in the header
// (n log n in the number of names).
Header parse(std::span<const std::byte> bytes, std::string_view path);

} // namespace mlx_gguf::gguf
