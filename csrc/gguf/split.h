// The names and metadata that tie the shards of a split model together.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "gguf/parse.h"

namespace mlx_gguf::gguf {

// split.no, split.count and split.tensors.count of a shard.
struct Split {
  uint64_t index; // from 0
  uint64_t count;
  uint64_t tensors; // in the whole set
};

// nullopt when the file is not one of several.
std::optional<Split> read_split(
    std::span<const std::byte> bytes,
    const Header& header,
    const std::string& path);

// The paths of all shards, from the path of one of them:
// {prefix}-{index + 1, 5 digits}-of-{count, 5 digits}.gguf. Throws Error when
// the name and the metadata disagree.
std::vector<std::string> shard_paths(
    const std::string& path, const Split& split);

} // namespace mlx_gguf::gguf
