#include "gguf/file.h"

#include <cerrno>

#include "gguf/names.h"
#include "gguf/split.h"

namespace mlx_gguf::gguf {

namespace {

std::shared_ptr<const Mapping> open_shard(
    const std::string& path, const Split& split, uint64_t index, bool copy) {
  try {
    return Mapping::open(path, copy);
  } catch (const Error& error) {
    if (error.os_error() != ENOENT) {
      throw;
    }
    throw Error(
        "shard " + std::to_string(index + 1) + " of " +
            std::to_string(split.count),
        path,
        ENOENT);
  }
}

void check_shard(
    const std::optional<Split>& shard,
    const Split& set,
    uint64_t index,
    const std::string& path) {
  if (!shard || shard->index != index || shard->count != set.count ||
      shard->tensors != set.tensors) {
    auto text = [](const Split& s) {
      return "shard " + std::to_string(s.index + 1) + " of " +
             std::to_string(s.count) + " with " + std::to_string(s.tensors) +
             " tensors in all";
    };
    throw Error(
        ErrorKind::malformed,
        "open",
        text({index, set.count, set.tensors}),
        shard ? text(*shard) : "a file without split metadata",
        path);
  }
}

} // namespace

std::shared_ptr<const File> File::open(const std::string& path, bool copy) {
  std::shared_ptr<File> file(new File);
  auto opened = Mapping::open(path, copy);
  Header header = parse(opened->bytes(), path);
  auto split = read_split(opened->bytes(), header, path);
  if (!split) {
    file->add_shard(path, std::move(opened), std::move(header));
    file->index();
    return file;
  }

  auto paths = shard_paths(path, *split);
  for (uint64_t i = 0; i < split->count; ++i) {
    if (i == split->index) {
      file->add_shard(paths[i], opened, header);
      continue;
    }
    auto mapping = open_shard(paths[i], *split, i, copy);
    Header other = parse(mapping->bytes(), paths[i]);
    check_shard(
        read_split(mapping->bytes(), other, paths[i]), *split, i, paths[i]);
    file->add_shard(paths[i], std::move(mapping), std::move(other));
  }
  if (file->tensors_.size() != split->tensors) {
    throw Error(
        ErrorKind::malformed,
        "open",
        std::to_string(split->tensors) + " tensors (split.tensors.count)",
        std::to_string(file->tensors_.size()) + " in all shards",
        path);
  }
  file->index();
  return file;
}

void File::add_shard(
    std::string path, std::shared_ptr<const Mapping> mapping, Header header) {
  auto shard = static_cast<uint32_t>(paths_.size());
  if (shard == 0) {
    version_ = header.version;
    metadata_ = std::move(header.metadata);
  }
  for (TensorInfo& t : header.tensors) {
    t.shard = shard;
    tensors_.push_back(std::move(t));
  }
  paths_.push_back(std::move(path));
  mappings_.push_back(std::move(mapping));
}

void File::index() {
  entries_by_key_ = order_by(metadata_, &Entry::key);
  tensors_by_name_ = order_by(tensors_, &TensorInfo::name);
  if (auto* twin = find_twin(tensors_, tensors_by_name_, &TensorInfo::name)) {
    throw Error(
        ErrorKind::malformed,
        "open",
        "every tensor in one shard only",
        quoted(twin->name) + " in more than one",
        paths_[twin->shard]);
  }
}

const Entry* File::find_entry(std::string_view key) const {
  return find_name(metadata_, entries_by_key_, &Entry::key, key);
}

const TensorInfo* File::find_tensor(std::string_view name) const {
  return find_name(tensors_, tensors_by_name_, &TensorInfo::name, name);
}

} // namespace mlx_gguf::gguf
