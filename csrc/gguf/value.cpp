#include "gguf/value.h"

#include <array>

namespace mlx_gguf::gguf {

namespace {

// Ordered by number. The bytes are the fewest that a value can take.
struct Row {
  const char* name;
  uint64_t bytes;
};
constexpr std::array<Row, 13> rows{{
    {"uint8", 1},
    {"int8", 1},
    {"uint16", 2},
    {"int16", 2},
    {"uint32", 4},
    {"int32", 4},
    {"float32", 4},
    {"bool", 1},
    {"string", 8}, // its length
    {"array", 12}, // the type and number of its elements
    {"uint64", 8},
    {"int64", 8},
    {"float64", 8},
}};

const Row& row(ValueType type) {
  return rows[static_cast<size_t>(type)];
}

void skip(Cursor& in, ValueType type, uint64_t count, int depth);

void skip_bools(Cursor& in, uint64_t count) {
  const std::byte* flags = in.take(count, "bools");
  for (uint64_t i = 0; i < count; ++i) {
    if (auto flag = std::to_integer<int>(flags[i]); flag > 1) {
      in.fail(ErrorKind::malformed, "a bool of 0 or 1", std::to_string(flag));
    }
  }
}

ArrayHeader skip_array(Cursor& in, int depth) {
  ArrayHeader header = read_array_header(in, depth);
  skip(in, header.element_type, header.count, depth + 1);
  return header;
}

void skip(Cursor& in, ValueType type, uint64_t count, int depth) {
  switch (type) {
    case ValueType::string:
      for (uint64_t i = 0; i < count; ++i) {
        in.text("a string");
      }
      return;
    case ValueType::array:
      for (uint64_t i = 0; i < count; ++i) {
        skip_array(in, depth);
      }
      return;
    case ValueType::boolean:
      return skip_bools(in, count);
    default:
      in.take(count * row(type).bytes, row(type).name);
  }
}

} // namespace

const char* name_of(ValueType type) {
  auto number = static_cast<size_t>(type);
  return number < rows.size() ? rows[number].name : nullptr;
}

ValueType read_type(Cursor& in) {
  auto number = in.read<uint32_t>("a value type");
  if (number >= rows.size()) {
    in.fail(
        ErrorKind::malformed,
        "a value type below " + std::to_string(rows.size()) + " at byte " +
            std::to_string(in.position() - sizeof(number)),
        std::to_string(number));
  }
  return static_cast<ValueType>(number);
}

ArrayHeader read_array_header(Cursor& in, int depth) {
  if (depth >= max_nesting) {
    in.fail(
        ErrorKind::malformed,
        "arrays nested at most " + std::to_string(max_nesting) + " deep",
        "a deeper one at byte " + std::to_string(in.position()));
  }
  ValueType element_type = read_type(in);
  return {element_type, in.count(row(element_type).bytes, "an array length")};
}

Value scan(Cursor& in) {
  Value value{read_type(in), in.position()};
  if (value.type == ValueType::array) {
    ArrayHeader header = skip_array(in, 0);
    value.element_type = header.element_type;
    value.count = header.count;
  } else {
    skip(in, value.type, 1, 0);
  }
  return value;
}

} // namespace mlx_gguf::gguf
