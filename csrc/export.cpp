#include "export.h"

#include <functional>

#include "mlx/ops.h"

namespace mlx_gguf {

namespace {

using mx::array;

thread_local bool native = false;

// Arithmetic on arrays of block fields, so that the formulas below read like
// those of the format. Integers are int32, numbers float32.
struct Value {
  array a;
  mx::StreamOrDevice s;

  Value operator+(const Value& o) const {
    return {mx::add(a, o.a, s), s};
  }
  Value operator-(const Value& o) const {
    return {mx::subtract(a, o.a, s), s};
  }
  Value operator*(const Value& o) const {
    return {mx::multiply(a, o.a, s), s};
  }
  Value operator-(int n) const {
    return {mx::subtract(a, array(n), s), s};
  }
  Value operator&(int n) const {
    return {mx::bitwise_and(a, array(n), s), s};
  }
  Value operator|(const Value& o) const {
    return {mx::bitwise_or(a, o.a, s), s};
  }
  Value operator<<(int n) const {
    return {mx::left_shift(a, array(n), s), s};
  }
  Value operator>>(int n) const {
    return {mx::right_shift(a, array(n), s), s};
  }
  // Each shift becomes an element of a new axis.
  Value shifts(std::vector<int> by, int axis) const {
    mx::Shape shape(a.ndim() + 1, 1);
    shape[axis < 0 ? shape.size() + axis : axis] = static_cast<int>(by.size());
    array n = mx::reshape(
        array(by.begin(), {static_cast<int>(by.size())}, mx::int32), shape, s);
    return {mx::right_shift(mx::expand_dims(a, axis, s), n, s), s};
  }
  Value number() const {
    return {mx::astype(a, mx::float32, s), s};
  }
  Value shape(mx::Shape inner) const {
    inner.insert(inner.begin(), a.shape(0));
    return {mx::reshape(a, inner, s), s};
  }
  Value over_last() const {
    return {mx::expand_dims(a, -1, s), s};
  }
  Value look_up(std::initializer_list<int> table) const {
    array t(table.begin(), {static_cast<int>(table.size())}, mx::int32);
    return {mx::take(t, a, s), s};
  }
};

// Blocks [n, block_bytes] and their fields.
struct Blocks {
  array bytes;
  mx::StreamOrDevice s;

  array raw(int from, int count) const {
    return mx::slice(bytes, {0, from}, {bytes.shape(0), from + count}, s);
  }
  Value u8(int from, int count) const {
    return {mx::astype(raw(from, count), mx::int32, s), s};
  }
  Value i8(int from, int count) const {
    array signed_ = mx::view(raw(from, count), mx::int8, s);
    return {mx::astype(signed_, mx::int32, s), s};
  }
  Value word(int from, mx::Dtype dtype) const {
    int size = static_cast<int>(mx::size_of(dtype));
    array w = mx::view(raw(from, size), dtype, s);
    mx::Dtype as = dtype == mx::float16 ? mx::float32 : mx::int32;
    return {mx::astype(w, as, s), s};
  }
  Value half(int from) const { // [n, 1]
    return word(from, mx::float16);
  }
};

Value concat(const Value& a, const Value& b, int axis) {
  return {mx::concatenate({a.a, b.a}, axis, a.s), a.s};
}

// 16 bytes: elements 0..15 in low nibbles, 16..31 in high ones.
Value nibbles(const Value& q) {
  return concat(q & 15, q >> 4, -1);
}

// 32 bits of a word as elements.
Value bits32(const Value& word) {
  std::vector<int> by(32);
  for (int i = 0; i < 32; ++i) {
    by[i] = i;
  }
  return (word.shifts(by, -1) & 1).shape({32});
}

struct ScalesMins {
  Value scale, min;                   // [n, 8]
  explicit ScalesMins(const Value& s) // [n, 12]
      : scale(s), min(s) {
    auto part = [&](int i) {
      array a = mx::slice(s.a, {0, 4 * i}, {s.a.shape(0), 4 * i + 4}, s.s);
      return Value{a, s.s};
    };
    Value a = part(0), b = part(1), c = part(2);
    scale = concat(a & 63, (c & 15) | ((a >> 6) << 4), -1);
    min = concat(b & 63, (c >> 4) | ((b >> 6) << 4), -1);
  }
};

// 128 bytes in four runs of 32, low nibbles then high ones: [n, 8, 32].
Value nibble_runs(const Value& q) {
  return (q.shape({4, 32}).shifts({0, 4}, 2) & 15).shape({8, 32});
}

Value with_mins(
    const Value& d, const Value& dmin, const ScalesMins& sm, const Value& q) {
  Value scale = (d * sm.scale.number()).over_last();
  Value min = (dmin * sm.min.number()).over_last();
  return scale * q.number() - min;
}

#define IQ4_VALUES \
  {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}

Value q2_k(const Blocks& b) {
  Value s = b.u8(0, 16);
  Value q =
      (b.u8(16, 64).shape({2, 32}).shifts({0, 2, 4, 6}, 2) & 3).shape({16, 16});
  Value scale = (b.half(80) * (s & 15).number()).over_last();
  Value min = (b.half(82) * (s >> 4).number()).over_last();
  return scale * q.number() - min;
}

Value q3_k(const Blocks& b) {
  Value low = b.u8(96, 8).shifts({0, 4}, 1).shape({16}) & 15;
  Value high = b.u8(104, 4).shifts({0, 2, 4, 6}, 1).shape({16}) & 3;
  Value scale = b.half(108) * ((low | (high << 4)) - 32).number();
  Value q = b.u8(32, 64).shape({2, 32}).shifts({0, 2, 4, 6}, 2) & 3;
  Value mask = b.u8(0, 32).shifts({0, 1, 2, 3, 4, 5, 6, 7}, 1) & 1;
  Value code = (q.shape({16, 16}) | (mask.shape({16, 16}) << 2)) - 4;
  return scale.over_last() * code.number();
}

Value q6_k(const Blocks& b) {
  // Halves of 128 weights: [half, high nibble?, two runs of 32].
  Value low = b.u8(0, 128).shape({2, 64}).shifts({0, 4}, 2) & 15;
  Value high = b.u8(128, 64).shape({2, 32}).shifts({0, 2, 4, 6}, 2) & 3;
  Value code = (low.shape({16, 16}) | (high.shape({16, 16}) << 4)) - 32;
  return (b.half(208) * b.i8(192, 16).number()).over_last() * code.number();
}

Value iq4_xs(const Blocks& b) {
  Value low = b.u8(4, 4).shifts({0, 4}, -1).shape({8}) & 15;
  Value high = b.word(2, mx::uint16).shifts({0, 2, 4, 6, 8, 10, 12, 14}, -1);
  Value scale =
      b.half(0) * ((low | ((high.shape({8}) & 3) << 4)) - 32).number();
  Value q = nibbles(b.u8(8, 128).shape({8, 16})).look_up(IQ4_VALUES);
  return scale.over_last() * q.number();
}

Value mxfp4(const Blocks& b) {
  // The scale's bits are e - 1 shifted into place, but for the two subnormals.
  Value e = b.u8(0, 1);
  array normal =
      mx::left_shift(mx::subtract(e.a, array(1), b.s), array(23), b.s);
  array small = mx::left_shift(array(0x00200000), e.a, b.s);
  array bits = mx::where(mx::less(e.a, array(2), b.s), small, normal, b.s);
  Value d{mx::view(bits, mx::float32, b.s), b.s};
  Value q =
      nibbles(b.u8(1, 16))
          .look_up({0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12});
  return d * q.number();
}

// One row per packed type; ids as in formats.cpp.
struct Decode {
  const char* name;
  std::function<Value(const Blocks&)> values;
};

const Decode decodes[] = {
    {"q4_0",
     [](const Blocks& b) {
       return b.half(0) * (nibbles(b.u8(2, 16)) - 8).number();
     }},
    {"q4_1",
     [](const Blocks& b) {
       return b.half(0) * nibbles(b.u8(4, 16)).number() + b.half(2);
     }},
    {"q5_0",
     [](const Blocks& b) {
       Value high = bits32(b.word(2, mx::uint32)) << 4;
       return b.half(0) * ((nibbles(b.u8(6, 16)) | high) - 16).number();
     }},
    {"q5_1",
     [](const Blocks& b) {
       Value high = bits32(b.word(4, mx::uint32)) << 4;
       return b.half(0) * (nibbles(b.u8(8, 16)) | high).number() + b.half(2);
     }},
    {"q8_0", [](const Blocks& b) { return b.half(0) * b.i8(2, 32).number(); }},
    {"q2_k", q2_k},
    {"q3_k", q3_k},
    {"q4_k",
     [](const Blocks& b) {
       Value q = nibble_runs(b.u8(16, 128));
       return with_mins(b.half(0), b.half(2), ScalesMins(b.u8(4, 12)), q);
     }},
    {"q5_k",
     [](const Blocks& b) {
       Value high = b.u8(16, 32).shifts({0, 1, 2, 3, 4, 5, 6, 7}, 1) & 1;
       Value q = nibble_runs(b.u8(48, 128)) | (high << 4);
       return with_mins(b.half(0), b.half(2), ScalesMins(b.u8(4, 12)), q);
     }},
    {"q6_k", q6_k},
    {"iq4_nl",
     [](const Blocks& b) {
       Value q = nibbles(b.u8(2, 16)).look_up(IQ4_VALUES);
       return b.half(0) * q.number();
     }},
    {"iq4_xs", iq4_xs},
    {"mxfp4", mxfp4},
};

} // namespace

bool native_ops() {
  return native;
}

void set_native_ops(bool on) {
  native = on;
}

array native_dequantize(
    const array& w,
    const Format& format,
    mx::Dtype dtype,
    mx::StreamOrDevice s) {
  mx::Shape shape = w.shape();
  shape.back() = shape.back() / format.block_bytes * format.block_size;
  if (format.plain) {
    return mx::astype(mx::view(w, *format.plain, s), dtype, s);
  }
  Blocks blocks{mx::reshape(w, {-1, format.block_bytes}, s), s};
  for (const Decode& d : decodes) {
    if (find_format(d.name) == &format) {
      array values = mx::reshape(d.values(blocks).a, shape, s);
      return mx::astype(values, dtype, s);
    }
  }
  throw std::logic_error(
      std::string(
          "[export] Expected a decode for every packed type. Received ") +
      format.name + ".");
}

// As the kernels do, everything is summed in f32 and rounded once.
array native_matmul(
    const std::vector<array>& inputs,
    const Format& format,
    bool transpose,
    float alpha,
    float beta,
    mx::StreamOrDevice s) {
  mx::Dtype dtype = inputs[0].dtype();
  array x = mx::astype(inputs[0], mx::float32, s);
  array w = native_dequantize(inputs[1], format, mx::float32, s);
  array y = mx::matmul(x, transpose ? mx::swapaxes(w, -1, -2, s) : w, s);
  y = mx::multiply(y, array(alpha), s);
  if (inputs.size() == 3) {
    array c = mx::astype(inputs[2], mx::float32, s);
    y = mx::add(y, mx::multiply(c, array(beta), s), s);
  }
  return mx::astype(y, dtype, s);
}

array native_gather(
    const std::vector<array>& inputs,
    const Format& format,
    bool transpose,
    mx::StreamOrDevice s) {
  array x = mx::astype(inputs[0], mx::float32, s);
  array w = native_dequantize(inputs[1], format, mx::float32, s);
  w = transpose ? mx::swapaxes(w, -1, -2, s) : w;
  array y = mx::gather_mm(x, w, inputs[2], inputs[3], false, s);
  return mx::astype(y, inputs[0].dtype(), s);
}

} // namespace mlx_gguf
