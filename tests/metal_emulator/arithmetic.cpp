// Undefined-behaviour reports, and the half and bfloat conversions that the
// compiler calls where the processor has none.
#include <stdint.h>
#include <string.h>

#include "memory.h"

// --- UndefinedBehaviorSanitizer's interface ---

namespace {
struct SourceLocation {
  const char* file;
  uint32_t line;
  uint32_t column;
};

[[noreturn]] void report(const char* what, const void* data) {
  // Every report's data begins with the place in the source.
  const SourceLocation& at = *static_cast<const SourceLocation*>(data);
  mtl_fail_at(
      0,
      "Expected defined behaviour. Received %s (%s:%u:%u)",
      what,
      at.file ? at.file : "?",
      at.line,
      at.column);
}
} // namespace

#define HANDLER(name, text)                                   \
  extern "C" void __ubsan_handle_##name(void* data) {         \
    report(text, data);                                       \
  }                                                           \
  extern "C" void __ubsan_handle_##name##_abort(void* data) { \
    report(text, data);                                       \
  }
HANDLER(add_overflow, "signed overflow in an addition")
HANDLER(sub_overflow, "signed overflow in a subtraction")
HANDLER(mul_overflow, "signed overflow in a multiplication")
HANDLER(negate_overflow, "signed overflow in a negation")
HANDLER(divrem_overflow, "a division by zero or a signed overflow in it")
HANDLER(shift_out_of_bounds, "a shift beyond the width or out of range")
HANDLER(out_of_bounds, "an array index out of bounds")
HANDLER(pointer_overflow, "pointer arithmetic that overflows or is on null")
HANDLER(type_mismatch_v1, "a null or misaligned pointer")
HANDLER(alignment_assumption, "a misaligned pointer")
HANDLER(float_cast_overflow, "a float that does not fit the integer type")
HANDLER(load_invalid_value, "an invalid value of a bool or an enum")
HANDLER(invalid_builtin, "a builtin called with a forbidden value")
HANDLER(builtin_unreachable, "unreachable code that was reached")
HANDLER(missing_return, "a function that ended without its value")
HANDLER(vla_bound_not_positive, "an array of no elements")
HANDLER(nonnull_arg, "a null argument")
HANDLER(nonnull_return_v1, "a null result")
HANDLER(function_type_mismatch, "a call through a wrong type")
HANDLER(local_out_of_bounds, "an access out of bounds")

// --- Conversions ---

namespace {
template <typename To, typename From>
To bits_as(From from) {
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
} // namespace

extern "C" float __extendhfsf2(_Float16 h) {
  uint32_t b = bits_as<uint16_t>(h);
  uint32_t sign = (b & 0x8000) << 16, magnitude = b & 0x7fff;
  if (magnitude >= 0x7c00) {
    return bits_as<float>(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  }
  if (magnitude < 0x400) {
    float value = mtl_flush_half ? 0.0f : magnitude * 0x1p-24f;
    return bits_as<float>(sign | bits_as<uint32_t>(value));
  }
  return bits_as<float>(sign | ((magnitude << 13) + ((127 - 15) << 23)));
}

extern "C" _Float16 __truncsfhf2(float f) {
  uint32_t b = bits_as<uint32_t>(f);
  uint16_t sign = b >> 16 & 0x8000;
  uint32_t magnitude = b & 0x7fffffff;
  uint16_t result;
  if (magnitude > 0x7f800000) {
    result = 0x7e00;
  } else if (magnitude >= 0x477ff000) {
    result = 0x7c00; // 65520 and above round to infinity.
  } else if (magnitude < 0x38800000) {
    // Adding 0.5 leaves the subnormal's bits, rounded to even, at the bottom.
    float shifted = bits_as<float>(magnitude) + 0.5f;
    result = mtl_flush_half ? 0 : bits_as<uint32_t>(shifted) - 0x3f000000;
    if (mtl_flush_half && bits_as<uint32_t>(shifted) - 0x3f000000 == 0x400) {
      result = 0x400;
    }
  } else {
    uint32_t odd = magnitude >> 13 & 1;
    result = (magnitude - ((127 - 15) << 23) + 0xfff + odd) >> 13;
  }
  return bits_as<_Float16>(uint16_t(sign | result));
}

extern "C" __bf16 __truncsfbf2(float f) {
  uint32_t b = bits_as<uint32_t>(f);
  if ((b & 0x7fffffff) > 0x7f800000) {
    return bits_as<__bf16>(uint16_t(b >> 16 | 0x40));
  }
  return bits_as<__bf16>(uint16_t((b + 0x7fff + (b >> 16 & 1)) >> 16));
}
