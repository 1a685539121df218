// Metadata values: where they are in the file, and how they are read.
#pragma once

#include <cstdint>
#include <string_view>

#include "gguf/cursor.h"

namespace mlx_gguf::gguf {

// Numbers are the file format's.
enum class ValueType : uint32_t {
  uint8 = 0,
  int8 = 1,
  uint16 = 2,
  int16 = 3,
  uint32 = 4,
  int32 = 5,
  float32 = 6,
  boolean = 7,
  string = 8,
  array = 9,
  uint64 = 10,
  int64 = 11,
  float64 = 12,
};

// "uint8", ..., "bool", "string", "array"; nullptr for an unknown number.
const char* name_of(ValueType type);

// Arrays of arrays deeper than this are refused; files in use have depth 1.
constexpr int max_nesting = 8;

// A validated value that has not been decoded.
struct Value {
  ValueType type;
  uint64_t offset; // of the value in the file
  // Of arrays only: the type and number of the elements.
  ValueType element_type = ValueType::array;
  uint64_t count = 0;
};

struct ArrayHeader {
  ValueType element_type;
  uint64_t count;
};

ValueType read_type(Cursor& in);

// Reads the header of an array whose elements can still be in the file.
ArrayHeader read_array_header(Cursor& in, int depth);

// Reads past a value, checking all of it. Linear in the value's bytes.
Value scan(Cursor& in);

// Feeds a value to `sink` piece by piece: number(x) with x a bool, (u)int64_t
// or double; string(text); begin(header) ... end() around the elements of an
// array. Checks as it reads, because a mapped file can change under the reader.
template <typename Sink>
void visit(Cursor& in, ValueType type, Sink& sink, int depth = 0) {
  switch (type) {
    case ValueType::uint8:
      return sink.number(uint64_t{in.read<uint8_t>("a uint8")});
    case ValueType::int8:
      return sink.number(int64_t{in.read<int8_t>("an int8")});
    case ValueType::uint16:
      return sink.number(uint64_t{in.read<uint16_t>("a uint16")});
    case ValueType::int16:
      return sink.number(int64_t{in.read<int16_t>("an int16")});
    case ValueType::uint32:
      return sink.number(uint64_t{in.read<uint32_t>("a uint32")});
    case ValueType::int32:
      return sink.number(int64_t{in.read<int32_t>("an int32")});
    case ValueType::uint64:
      return sink.number(in.read<uint64_t>("a uint64"));
    case ValueType::int64:
      return sink.number(in.read<int64_t>("an int64"));
    case ValueType::float32:
      return sink.number(double{in.read<float>("a float32")});
    case ValueType::float64:
      return sink.number(in.read<double>("a float64"));
    case ValueType::boolean:
      return sink.number(in.read<uint8_t>("a bool") != 0);
    case ValueType::string:
      return sink.string(in.text("a string"));
    case ValueType::array: {
      ArrayHeader header = read_array_header(in, depth);
      sink.begin(header);
      for (uint64_t i = 0; i < header.count; ++i) {
        visit(in, header.element_type, sink, depth + 1);
      }
      return sink.end();
    }
  }
}

} // namespace mlx_gguf::gguf
