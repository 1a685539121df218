#include "gguf/split.h"

#include <algorithm>
#include <array>
#include <cstdio>

namespace mlx_gguf::gguf {

namespace {

// The name has five digits for it.
constexpr uint64_t max_shards = 99999;

std::optional<uint64_t> read_integer(
    std::span<const std::byte> bytes,
    const Header& header,
    const std::string& path,
    std::string_view key) {
  auto entry = std::find_if(
      header.metadata.begin(), header.metadata.end(), [&](const Entry& e) {
        return e.key == key;
      });
  if (entry == header.metadata.end()) {
    return std::nullopt;
  }
  struct Sink {
    std::optional<uint64_t> value;
    void number(uint64_t x) {
      value = x;
    }
    void number(int64_t x) {
      if (x >= 0) {
        value = static_cast<uint64_t>(x);
      }
    }
    void number(bool) {}
    void number(double) {}
    void string(std::string_view) {}
    void begin(const ArrayHeader&) {}
    void end() {}
  } sink;
  Cursor in(bytes, path, entry->value.offset);
  if (entry->value.type != ValueType::array) {
    visit(in, entry->value.type, sink);
  }
  if (!sink.value) {
    in.fail(
        ErrorKind::malformed,
        std::string(key) + " to be an integer that is not negative",
        name_of(entry->value.type));
  }
  return sink.value;
}

std::string suffix(uint64_t index, uint64_t count) {
  std::array<char, 64> text;
  std::snprintf(
      text.data(),
      text.size(),
      "-%05llu-of-%05llu.gguf",
      static_cast<unsigned long long>(index + 1),
      static_cast<unsigned long long>(count));
  return text.data();
}

} // namespace

std::optional<Split> read_split(
    std::span<const std::byte> bytes,
    const Header& header,
    const std::string& path) {
  auto integer = [&](const char* key) {
    return read_integer(bytes, header, path, key);
  };
  auto count = integer("split.count");
  if (!count || *count <= 1) {
    return std::nullopt;
  }
  auto index = integer("split.no");
  if (!index || *index >= *count || *count > max_shards) {
    throw Error(
        ErrorKind::malformed,
        "open",
        "split.no below split.count, and that at most " +
            std::to_string(max_shards),
        (index ? std::to_string(*index) : "no split.no") + " and " +
            std::to_string(*count),
        path);
  }
  auto tensors = integer("split.tensors.count");
  if (!tensors) {
    throw Error(
        ErrorKind::malformed,
        "open",
        "split.tensors.count next to split.count",
        "none",
        path);
  }
  return Split{*index, *count, *tensors};
}

std::vector<std::string> shard_paths(
    const std::string& path, const Split& split) {
  std::string ending = suffix(split.index, split.count);
  if (!path.ends_with(ending)) {
    throw Error(
        ErrorKind::malformed,
        "open",
        "a name that ends with '" + ending + "' (shard " +
            std::to_string(split.index + 1) + " of " +
            std::to_string(split.count) + ", says its metadata)",
        "another name",
        path);
  }
  std::string prefix = path.substr(0, path.size() - ending.size());
  std::vector<std::string> paths;
  for (uint64_t i = 0; i < split.count; ++i) {
    paths.push_back(prefix + suffix(i, split.count));
  }
  return paths;
}

} // namespace mlx_gguf::gguf
