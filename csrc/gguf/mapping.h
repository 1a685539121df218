// A whole file as read-only memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace mlx_gguf::gguf {

// The mapping outlives the file's name: renaming, deleting or replacing the
// file (by a rename over it) leaves the bytes in place. Shortening the file in
// place while it is mapped makes the lost pages fault, which nothing can turn
// into an error; `copy` reads everything at once for files that may change.
class Mapping {
 public:
  // Regular files only; never blocks on a FIFO or a device. Throws Error.
  static std::shared_ptr<const Mapping> open(
      const std::string& path, bool copy);

  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  std::span<const std::byte> bytes() const {
    return {data_, size_};
  }

  // Throws Error when the file of this path is still the mapped one, but was
  // shortened. A file under another name, or gone, cannot be asked.
  void check_length(const std::string& path) const;

  // Gives the resident pages that lie wholly in the range back to the system,
  // which reads them from the file again when they are used. Does nothing to
  // memory that is not on a mapped file.
  static void forget(const std::byte* begin, size_t size);

  // Readable zero bytes directly before bytes(): a reader of MLX's buffer
  // header (see array.cpp) finds them instead of the file's contents.
  size_t guard() const {
    return guard_;
  }

 private:
  Mapping(void* base, size_t guard, size_t size);

  void* base_;
  uint64_t device_ = 0; // of the mapped file, to know it again; 0 of a copy
  uint64_t inode_ = 0;
  size_t guard_;
  std::byte* data_;
  size_t size_;
};

} // namespace mlx_gguf::gguf
