#include "step.h"

#include "cuda/attend.h"
#include "cuda/backend.h"
#include "export.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"

namespace mlx_gguf {

namespace {

using Arrays = std::vector<array>;

constexpr int growth = 256; // rows, as mlx-lm's caches grow

class Step : public mx::UnaryPrimitive {
 public:
  Step(
      mx::Stream stream,
      std::shared_ptr<History> history,
      int position,
      int number)
      : UnaryPrimitive(stream),
        history_(std::move(history)),
        position_(position),
        number_(number) {}

  void eval_cpu(const Arrays& inputs, array& out) override {
    take(inputs);
    cpu::step(inputs[0], out, history_, position_, number_, stream());
  }

  void eval_gpu(const Arrays& inputs, array& out) override {
    take(inputs);
    cuda::loaded()->step(
        inputs[0], out, history_, position_, number_, stream());
  }

  const char* name() const override {
    return "GGUFStep";
  }

 private:
  // The first step's inputs are what the history begins with.
  void take(const Arrays& inputs) {
    if (number_ > 0) {
      return;
    }
    size_t layers = history_->stack->layers().size();
    history_->first.clear();
    history_->second.clear();
    for (size_t i = 0; i < 2 * layers; ++i) {
      const array& from = inputs[1 + i];
      array mine(from.shape(), from.dtype(), nullptr, {});
      mine.copy_shared_buffer(from);
      (i < layers ? history_->first : history_->second).push_back(mine);
    }
  }

  std::shared_ptr<History> history_;
  int position_;
  int number_;
};

// inputs: what the last step gave. The output may be a part of an array.
class ReadHistory : public mx::UnaryPrimitive {
 public:
  ReadHistory(
      mx::Stream stream,
      std::shared_ptr<History> history,
      int layer,
      bool first,
      int64_t from)
      : UnaryPrimitive(stream),
        history_(std::move(history)),
        layer_(layer),
        first_(first),
        from_(from) {}

  void eval_cpu(const Arrays&, array& out) override {
    hand_out(out);
  }
  void eval_gpu(const Arrays&, array& out) override {
    hand_out(out);
  }
  const char* name() const override {
    return "GGUFReadHistory";
  }

 private:
  void hand_out(array& out) {
    const array& all = (first_ ? history_->first : history_->second)[layer_];
    out.copy_shared_buffer(
        all, out.strides(), all.flags(), out.size(), from_ * out.size());
  }

  std::shared_ptr<History> history_;
  int layer_;
  bool first_;
  int64_t from_; // parts of the array, as large as the output
};

bool has_kernels(const mx::Stream& s, const Sizes& sizes) {
  return s.device == mx::Device::cpu ||
         (cuda::loaded() && cuda::takes_steps(sizes));
}

} // namespace

int64_t History::nbytes(int layer) const {
  const Sizes& s = stack->sizes();
  auto numbers = static_cast<int64_t>(mx::size_of(stack->dtype()));
  if (stack->layers().at(layer).delta) {
    const DeltaSizes& d = s.delta;
    return (d.taps - 1) * d.channels() * numbers +
           int64_t{4} * d.values() * d.head_dim;
  }
  return int64_t{2} * capacity * s.keys() * numbers;
}

namespace {

// What a step may write to; nothing if it is not what a layer keeps.
std::optional<array> own_rows(
    const array& a,
    const Stack& stack,
    int length,
    int capacity,
    mx::Stream s) {
  const Sizes& sizes = stack.sizes();
  if (a.ndim() != 4 || a.dtype() != stack.dtype() || a.shape(0) != 1 ||
      a.shape(1) != sizes.kv_heads || a.shape(2) < length ||
      a.shape(3) != sizes.head_dim || a.is_tracer()) {
    return std::nullopt;
  }
  mx::Shape end{1, sizes.kv_heads, length, sizes.head_dim}, room = end;
  room[2] = capacity - length;
  array filled = mx::slice(a, {0, 0, 0, 0}, end, s);
  return mx::concatenate({filled, mx::zeros(room, a.dtype(), s)}, 2, s);
}
std::optional<array> own_window(
    const array& a, const Stack& stack, mx::Stream s) {
  const DeltaSizes& d = stack.sizes().delta;
  if (a.shape() != mx::Shape{1, d.taps - 1, d.channels()} ||
      a.dtype() != stack.dtype() || a.is_tracer()) {
    return std::nullopt;
  }
  return mx::concatenate({a, a}, 0, s);
}
std::optional<array> own_state(
    const array& a, const Stack& stack, mx::Stream s) {
  const DeltaSizes& d = stack.sizes().delta;
  if (a.shape() != mx::Shape{1, d.heads, d.head_dim, d.head_dim} ||
      a.dtype() != mx::float32 || a.is_tracer()) {
    return std::nullopt;
  }
  // In row order; a copy would share its memory, and a sum keeps its strides.
  return mx::add(mx::contiguous(a, false, s), array(0.0f), s);
}

} // namespace

std::shared_ptr<History> begin_history(
    std::shared_ptr<const Stack> stack,
    const Arrays& first,
    const Arrays& second,
    int length,
    mx::StreamOrDevice s) {
  const std::vector<Layer>& layers = stack->layers();
  mx::Stream stream = mx::to_stream(s);
  if (native_ops() || !has_kernels(stream, stack->sizes())) {
    return nullptr;
  }
  if (first.size() != layers.size() || second.size() != layers.size() ||
      length < 1) {
    return nullptr;
  }
  auto out = std::make_shared<History>();
  out->capacity = (length / growth + 1) * growth;
  for (auto* from : {&first, &second}) {
    for (size_t i = 0; i < layers.size(); ++i) {
      const array& a = (*from)[i];
      std::optional<array> own =
          !layers[i].delta ? own_rows(a, *stack, length, out->capacity, stream)
          : from == &first ? own_window(a, *stack, stream)
                           : own_state(a, *stack, stream);
      if (!own) {
        return nullptr;
      }
      out->wanted.push_back(*own);
    }
  }
  out->stack = std::move(stack);
  return out;
}

std::optional<array> step(
    const std::shared_ptr<History>& history,
    const array& x,
    int position,
    const std::optional<array>& last,
    mx::StreamOrDevice s) {
  const Stack& stack = *history->stack;
  mx::Stream stream = mx::to_stream(s);
  if (native_ops() || !has_kernels(stream, stack.sizes()) || x.is_tracer() ||
      x.shape() != mx::Shape{1, 1, stack.sizes().hidden} ||
      x.dtype() != stack.dtype() || position < 1 ||
      position >= history->capacity) {
    return std::nullopt;
  }
  Arrays inputs{x};
  if (last) {
    inputs.push_back(*last);
  } else {
    inputs.insert(inputs.end(), history->wanted.begin(), history->wanted.end());
    history->wanted.clear();
  }
  return array(
      x.shape(),
      x.dtype(),
      std::make_shared<Step>(stream, history, position, history->steps++),
      std::move(inputs));
}

std::pair<array, array> read_history(
    const std::shared_ptr<History>& history,
    int layer,
    const std::optional<array>& last,
    mx::StreamOrDevice s) {
  const Stack& stack = *history->stack;
  const Sizes& sizes = stack.sizes();
  const DeltaSizes& d = sizes.delta;
  bool delta = stack.layers().at(layer).delta.has_value();
  mx::Shape window{1, d.taps - 1, d.channels()};
  if (!last) {
    array first = history->wanted.at(layer);
    return {
        delta ? mx::slice(first, {0, 0, 0}, window, s) : first,
        history->wanted.at(layer + stack.layers().size())};
  }
  auto make =
      [&](bool first, mx::Shape shape, mx::Dtype dtype, int64_t from = 0) {
        return array(
            std::move(shape),
            dtype,
            std::make_shared<ReadHistory>(
                mx::to_stream(s), history, layer, first, from),
            {*last});
      };
  if (delta) {
    return {
        make(true, window, stack.dtype(), history->steps % 2),
        make(false, {1, d.heads, d.head_dim, d.head_dim}, mx::float32)};
  }
  mx::Shape rows{1, sizes.kv_heads, history->capacity, sizes.head_dim};
  return {make(true, rows, stack.dtype()), make(false, rows, stack.dtype())};
}

} // namespace mlx_gguf
