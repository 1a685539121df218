// What the tasks behind cpu/fast.h have in common.
#pragma once

#include <algorithm>
#include <functional>

#include "cpu/activations.h"
#include "cpu/numbers.h"
#include "cpu/threads.h"
#include "mlx/allocator.h"
#include "mlx/array.h"
#include "mlx/backend/cpu/encoder.h"

namespace mlx_gguf::cpu {

inline int64_t padded(int64_t n) {
  return (n + x_padding - 1) / x_padding * x_padding;
}

// An array as a task sees it, with whatever strides it has. MLX keeps the data
// until the stream has passed the node.
struct View {
  explicit View(const mlx::core::array& a)
      : data(a.data<char>()),
        number(number_of(a.dtype())),
        item(static_cast<int64_t>(a.itemsize())),
        shape(a.shape()),
        strides(a.strides()) {}

  const char* data;
  Number number;
  int64_t item;
  mlx::core::Shape shape;
  mlx::core::Strides strides;

  int64_t step() const {
    return strides.back();
  }

  // The element at which a row, of all axes but the last, begins.
  int64_t row(int64_t index) const {
    int64_t at = 0;
    for (int axis = static_cast<int>(shape.size()) - 2; axis >= 0; --axis) {
      at += index % shape[axis] * strides[axis];
      index /= shape[axis];
    }
    return at;
  }

  void read(int64_t at, int64_t step, int64_t n, float* out) const {
    const char* from = data + at * item;
    if (step == 1) {
      isa().to_f32(number, from, n, out);
      return;
    }
    for (int64_t i = 0; i < n; ++i) {
      isa().to_f32(number, from + i * step * item, 1, out + i);
    }
  }

  // The last axis from an element on, in f32: in place, or in `out`.
  const float* floats(int64_t at, float* out) const {
    if (number == Number::f32 && step() == 1) {
      return reinterpret_cast<const float*>(data) + at;
    }
    read(at, step(), shape.back(), out);
    return out;
  }
};

// Rows of an output, written from f32 that may already be in place.
struct Target {
  explicit Target(mlx::core::array& a)
      : data(a.data<char>()), number(number_of(a.dtype())) {}

  char* data;
  Number number;

  float* floats(int64_t at, float* scratch) const {
    return number == Number::f32 ? reinterpret_cast<float*>(data) + at
                                 : scratch;
  }

  void write(const float* from, int64_t at, int64_t n) const {
    if (number != Number::f32) {
      isa().from_f32(number, from, n, data + at * 2);
    }
  }
};

inline float* floats_of(const Buffer& buffer) {
  return reinterpret_cast<float*>(buffer.get());
}

// Calls body(first, last) for parts of [0, n) that are worth a thread.
inline void for_parts(
    int64_t n,
    int64_t numbers_each,
    const std::function<void(int64_t, int64_t)>& body) {
  constexpr int64_t numbers = 16384;
  int64_t each =
      std::max<int64_t>(1, numbers / std::max<int64_t>(1, numbers_each));
  parallel_for((n + each - 1) / each, [&](int64_t i) {
    body(i * each, std::min(n, (i + 1) * each));
  });
}

// Enqueues work on the stream.
template <typename F>
void enqueue(
    const std::vector<mlx::core::array>& inputs,
    mlx::core::array& out,
    mlx::core::Stream s,
    F&& work) {
  auto& encoder = mlx::core::cpu::get_command_encoder(s);
  for (const mlx::core::array& a : inputs) {
    encoder.set_input_array(a);
  }
  encoder.set_output_array(out);
  encoder.dispatch(std::forward<F>(work));
}

} // namespace mlx_gguf::cpu
