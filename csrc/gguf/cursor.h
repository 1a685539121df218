// Bounds-checked reading of little-endian fields.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "gguf/error.h"

namespace mlx_gguf::gguf {

static_assert(std::endian::native == std::endian::little);

class Cursor {
 public:
  // `path` must outlive the cursor; it names the file in errors.
  Cursor(
      std::span<const std::byte> bytes,
      std::string_view path,
      uint64_t position = 0)
      : bytes_(bytes), path_(path), position_(position) {}

  uint64_t position() const {
    return position_;
  }
  uint64_t remaining() const {
    return position_ < bytes_.size() ? bytes_.size() - position_ : 0;
  }

  // `what` names the field in the error.
  template <typename T>
  T read(const char* what) {
    T value;
    std::memcpy(&value, take(sizeof(T), what), sizeof(T));
    return value;
  }

  // A string: its length in 64 bits, then its bytes, kept in the file.
  std::string_view text(const char* what) {
    auto length = read<uint64_t>(what);
    return {reinterpret_cast<const char*>(take(length, what)), length};
  }

  const std::byte* take(uint64_t length, const char* what) {
    if (length > remaining()) {
      fail(
          ErrorKind::truncated,
          std::to_string(length) + " bytes for " + what + " at byte " +
              std::to_string(position_),
          std::to_string(remaining()) + " bytes to the end of the file");
    }
    const std::byte* at = bytes_.data() + position_;
    position_ += length;
    return at;
  }

  // A number of things of at least `smallest` bytes each, so that no count
  // larger than the rest of the file is ever believed.
  uint64_t count(uint64_t smallest, const char* what) {
    auto n = read<uint64_t>(what);
    if (n > remaining() / smallest) {
      fail(
          ErrorKind::truncated,
          std::string(what) + " of at most " +
              std::to_string(remaining() / smallest) + " (" +
              std::to_string(remaining()) + " bytes left)",
          std::to_string(n));
    }
    return n;
  }

  [[noreturn]] void fail(
      ErrorKind kind,
      std::string_view expected,
      std::string_view received) const {
    throw Error(kind, "open", expected, received, path_);
  }

 private:
  std::span<const std::byte> bytes_;
  std::string_view path_;
  uint64_t position_;
};

} // namespace mlx_gguf::gguf
