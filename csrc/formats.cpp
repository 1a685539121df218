#include "formats.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <sstream>
#include <stdexcept>

namespace mlx_gguf {

namespace {

namespace mx = mlx::core;

constexpr auto none = std::nullopt;
constexpr double f32_tolerance = 2e-6;

// Sizes and ids are ggml's (ggml-common.h, ggml.h). A row without support has
// no alignment or tolerance: nothing ever reads its blocks.
const std::array table{
    //      name       id  size bytes align  ops   tolerance      plain
    Format{"f32", 0, 1, 4, 4, true, f32_tolerance, mx::float32},
    Format{"f16", 1, 1, 2, 2, true, f32_tolerance, mx::float16},
    Format{"q4_0", 2, 32, 18, 2, true, f32_tolerance, none},
    Format{"q4_1", 3, 32, 20, 4, true, f32_tolerance, none},
    Format{"q5_0", 6, 32, 22, 2, true, f32_tolerance, none},
    Format{"q5_1", 7, 32, 24, 8, true, f32_tolerance, none},
    Format{"q8_0", 8, 32, 34, 2, true, f32_tolerance, none},
    Format{"q8_1", 9, 32, 40, 0, false, 0, none},
    Format{"q2_k", 10, 256, 84, 4, true, f32_tolerance, none},
    Format{"q3_k", 11, 256, 110, 2, true, f32_tolerance, none},
    Format{"q4_k", 12, 256, 144, 16, true, f32_tolerance, none},
    Format{"q5_k", 13, 256, 176, 16, true, f32_tolerance, none},
    Format{"q6_k", 14, 256, 210, 2, true, f32_tolerance, none},
    Format{"q8_k", 15, 256, 292, 0, false, 0, none},
    Format{"iq2_xxs", 16, 256, 66, 0, false, 0, none},
    Format{"iq2_xs", 17, 256, 74, 0, false, 0, none},
    Format{"iq3_xxs", 18, 256, 98, 0, false, 0, none},
    Format{"iq1_s", 19, 256, 50, 0, false, 0, none},
    Format{"iq4_nl", 20, 32, 18, 2, true, f32_tolerance, none},
    Format{"iq3_s", 21, 256, 110, 0, false, 0, none},
    Format{"iq2_s", 22, 256, 82, 0, false, 0, none},
    Format{"iq4_xs", 23, 256, 136, 8, true, f32_tolerance, none},
    Format{"i8", 24, 1, 1, 1, false, 0, mx::int8},
    Format{"i16", 25, 1, 2, 2, false, 0, mx::int16},
    Format{"i32", 26, 1, 4, 4, false, 0, mx::int32},
    Format{"i64", 27, 1, 8, 8, false, 0, mx::int64},
    Format{"f64", 28, 1, 8, 8, false, 0, mx::float64},
    Format{"iq1_m", 29, 256, 56, 0, false, 0, none},
    Format{"bf16", 30, 1, 2, 2, true, f32_tolerance, mx::bfloat16},
    Format{"tq1_0", 34, 256, 54, 0, false, 0, none},
    Format{"tq2_0", 35, 256, 66, 0, false, 0, none},
    Format{"mxfp4", 39, 32, 17, 1, true, f32_tolerance, none},
    Format{"nvfp4", 40, 64, 36, 0, false, 0, none},
    Format{"q1_0", 41, 128, 18, 0, false, 0, none},
};

char lower(char c) {
  return static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
}

} // namespace

std::span<const Format> formats() {
  return table;
}

const Format* find_format(std::string_view name) {
  auto same = [&](const Format& f) {
    std::string_view known = f.name;
    return std::equal(
        known.begin(),
        known.end(),
        name.begin(),
        name.end(),
        [](char a, char b) { return a == lower(b); });
  };
  auto it = std::find_if(table.begin(), table.end(), same);
  return it == table.end() ? nullptr : &*it;
}

const Format* find_format(uint32_t id) {
  auto it = std::find_if(
      table.begin(), table.end(), [&](const Format& f) { return f.id == id; });
  return it == table.end() ? nullptr : &*it;
}

const Format& supported_format(std::string_view op, std::string_view name) {
  const Format* format = find_format(name);
  if (format && format->supported) {
    return *format;
  }
  std::ostringstream msg;
  msg << '[' << op << "] Expected a tensor type of";
  for (const Format& f : table) {
    if (f.supported) {
      msg << ' ' << f.name;
    }
  }
  msg << ". Received "
      << (format ? format->name : "'" + std::string(name) + "'")
      << (format ? ", which is known but has no kernels." : ".");
  throw std::invalid_argument(msg.str());
}

} // namespace mlx_gguf
