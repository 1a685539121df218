// An open GGUF model: one file, or all shards of a split set.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "gguf/mapping.h"
#include "gguf/parse.h"

namespace mlx_gguf::gguf {

// Immutable once open, so any number of threads may use it.
class File {
 public:
  // `path` may be any shard of a split set: the whole set is opened. `copy`
  // reads the files into memory instead of mapping them. Throws Error.
  static std::shared_ptr<const File> open(
      const std::string& path, bool copy = false);

  // One path per shard, in order.
  const std::vector<std::string>& paths() const {
    return paths_;
  }
  const std::shared_ptr<const Mapping>& mapping(uint32_t shard) const {
    return mappings_[shard];
  }
  uint32_t version() const {
    return version_;
  }

  // The first shard's, in its order.
  const std::vector<Entry>& metadata() const {
    return metadata_;
  }
  // Those of every shard, in order.
  const std::vector<TensorInfo>& tensors() const {
    return tensors_;
  }

  // nullptr when there is none of that name.
  const Entry* find_entry(std::string_view key) const;
  const TensorInfo* find_tensor(std::string_view name) const;

  // Decodes a metadata value into a sink; see visit in value.h.
  template <typename Sink>
  void decode(const Value& value, Sink& sink) const {
    Cursor in(mappings_[0]->bytes(), paths_[0], value.offset);
    visit(in, value.type, sink);
  }

 private:
  File() = default;
  void add_shard(
      std::string path, std::shared_ptr<const Mapping> mapping, Header header);
  void index();

  std::vector<std::string> paths_;
  std::vector<std::shared_ptr<const Mapping>> mappings_;
  uint32_t version_ = 0;
  std::vector<Entry> metadata_;
  std::vector<TensorInfo> tensors_;
  // Indices in the order of the names, for binary search.
  std::vector<size_t> entries_by_key_;
  std::vector<size_t> tensors_by_name_;
};

} // namespace mlx_gguf::gguf
