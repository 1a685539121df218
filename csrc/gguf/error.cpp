#include "gguf/error.h"

#include <system_error>

namespace mlx_gguf::gguf {

namespace {

template <typename... Parts>
std::string join(Parts... parts) {
  std::string text;
  (text.append(parts), ...);
  return text;
}

} // namespace

Error::Error(
    ErrorKind kind,
    std::string_view op,
    std::string_view expected,
    std::string_view received,
    std::string_view path)
    : std::runtime_error(join(
          "[",
          op,
          "] Expected ",
          expected,
          " in '",
          path,
          "'. Received ",
          received,
          ".")),
      kind_(kind),
      path_(path) {}

Error::Error(std::string_view expected, std::string_view path, int os_error)
    : std::runtime_error(join(
          "[open] Expected ",
          expected,
          ". Received ",
          std::generic_category().message(os_error))),
      kind_(ErrorKind::io),
      os_error_(os_error),
      path_(path) {}

std::string quoted(std::string_view text) {
  constexpr size_t longest = 96;
  constexpr char digits[] = "0123456789abcdef";
  std::string out = "'";
  for (char c : text.substr(0, longest)) {
    if (c >= ' ' && c <= '~') {
      out += c;
    } else {
      auto byte = static_cast<unsigned char>(c);
      out += {'\\', 'x', digits[byte >> 4], digits[byte & 15]};
    }
  }
  return out + (text.size() > longest ? "'..." : "'");
}

} // namespace mlx_gguf::gguf
