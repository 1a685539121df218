// What can be wrong with a file, as a value that callers and tests can match.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

namespace mlx_gguf::gguf {

enum class ErrorKind {
  not_gguf,         // another kind of file, or no regular file at all
  version,          // a GGUF version or byte order this reader does not take
  truncated,        // ends before what its header promises
  malformed,        // contradicts the format
  unsupported_type, // a tensor type without a known size or without kernels
  io,               // the operating system refused; see os_error()
};

class Error : public std::runtime_error {
 public:
  // `[op] Expected <expected> in <path>. Received <received>.`
  Error(
      ErrorKind kind,
      std::string_view op,
      std::string_view expected,
      std::string_view received,
      std::string_view path);

  // An errno of the operating system about a path.
  Error(std::string_view expected, std::string_view path, int os_error);

  ErrorKind kind() const {
    return kind_;
  }
  // errno and path of an io error; 0 and the path of the file otherwise.
  int os_error() const {
    return os_error_;
  }
  const std::string& path() const {
    return path_;
  }

 private:
  ErrorKind kind_;
  int os_error_ = 0;
  std::string path_;
};

// Text from a file, made safe to print: quoted, cut to a readable length,
// bytes that are not printable ASCII escaped.
std::string quoted(std::string_view text);

} // namespace mlx_gguf::gguf
