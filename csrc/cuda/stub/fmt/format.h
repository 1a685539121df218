// MLX's device.h includes fmt, which its wheels do not ship, and uses one
// function of it in a template that is not instantiated here.
#pragma once
#include <string>

namespace fmt {
template <typename... Args>
std::string format(const char* text, const Args&...) {
  return text;
}
} // namespace fmt
