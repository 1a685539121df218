#include "step.h"

#include <sstream>
#include <stdexcept>

#include "cuda/attend.h"
#include "cuda/backend.h"
#include "export.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"

namespace mlx_gguf {

namespace {

using Arrays = std::vector<array>;

constexpr int growth = 256; // rows, as mlx-lm's caches grow

template <typename... Parts>
[[noreturn]] void invalid(const Parts&... parts) {
  std::ostringstream msg;
  msg << "[Stack] Expected ";
  (msg << ... << parts);
  throw std::invalid_argument(msg.str() + ".");
}

void check_vector(const char* name, const array& a, int size, mx::Dtype dtype) {
  if (a.shape() != mx::Shape{size} || a.dtype() != dtype) {
    invalid(
        name,
        " of shape (",
        size,
        ",) and dtype ",
        dtype,
        ". Received shape ",
        a.shape(),
        " and dtype ",
        a.dtype());
  }
}

void check_projection(const char* name, const Projection& p, int K) {
  const Format& format = *p.format;
  if (p.w.ndim() != 2 || p.w.dtype() != mx::uint8 || !format.packed() ||
      p.w.shape(1) % format.block_bytes != 0 || p.K() != K) {
    invalid(
        name,
        " to be packed rows of ",
        K,
        " weights. Received ",
        format.name,
        " of shape ",
        p.w.shape(),
        " and dtype ",
        p.w.dtype());
  }
}

void check_rows(
    const char* name, const std::vector<Projection>& parts, int rows) {
  int sum = 0;
  for (const Projection& p : parts) {
    sum += p.N();
  }
  if (sum != rows) {
    invalid(name, " to have ", rows, " rows. Received ", sum);
  }
}

class Step : public mx::UnaryPrimitive {
 public:
  Step(
      mx::Stream stream,
      std::shared_ptr<History> history,
      int position,
      bool first)
      : UnaryPrimitive(stream),
        history_(std::move(history)),
        position_(position),
        first_(first) {}

  void eval_cpu(const Arrays& inputs, array& out) override {
    take(inputs);
    cpu::step(inputs[0], out, history_, position_, stream());
  }

  void eval_gpu(const Arrays& inputs, array& out) override {
    take(inputs);
    cuda::loaded()->step(inputs[0], out, history_, position_, stream());
  }

  const char* name() const override {
    return "GGUFStep";
  }

 private:
  // The first step's inputs are what the history begins with.
  void take(const Arrays& inputs) {
    if (!first_) {
      return;
    }
    size_t layers = history_->stack->layers().size();
    history_->keys.clear();
    history_->values.clear();
    for (size_t i = 0; i < 2 * layers; ++i) {
      const array& from = inputs[1 + i];
      array mine(from.shape(), from.dtype(), nullptr, {});
      mine.copy_shared_buffer(from);
      (i < layers ? history_->keys : history_->values).push_back(mine);
    }
  }

  std::shared_ptr<History> history_;
  int position_;
  bool first_;
};

// inputs: what the last step gave.
class ReadHistory : public mx::UnaryPrimitive {
 public:
  ReadHistory(
      mx::Stream stream, std::shared_ptr<History> history, int layer, bool keys)
      : UnaryPrimitive(stream),
        history_(std::move(history)),
        layer_(layer),
        keys_(keys) {}

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
    out.copy_shared_buffer((keys_ ? history_->keys : history_->values)[layer_]);
  }

  std::shared_ptr<History> history_;
  int layer_;
  bool keys_;
};

bool has_kernels(const mx::Stream& s, const Sizes& sizes) {
  return s.device == mx::Device::cpu ||
         (cuda::loaded() && cuda::attend_plan(sizes, 1).heads > 0);
}

} // namespace

// Stack

Stack::Stack(Sizes sizes, array norm)
    : sizes_(std::move(sizes)), norm_(std::move(norm)) {
  const Sizes& s = sizes_;
  if (s.hidden < 1 || s.inner < 1 || s.kv_heads < 1 || s.head_dim < 1 ||
      s.heads < 1 || s.heads % s.kv_heads != 0) {
    invalid(
        "sizes of at least 1 and heads in groups. Received hidden ",
        s.hidden,
        ", inner ",
        s.inner,
        ", heads ",
        s.heads,
        ", kv_heads ",
        s.kv_heads,
        ", head_dim ",
        s.head_dim);
  }
  if (s.speeds.empty() ||
      2 * s.speeds.size() > static_cast<size_t>(s.head_dim)) {
    invalid(
        "1 to ", s.head_dim / 2, " rotated pairs. Received ", s.speeds.size());
  }
  check_vector("the last norm", norm_, s.hidden, norm_.dtype());
  if (norm_.dtype() != mx::float16 && norm_.dtype() != mx::bfloat16 &&
      norm_.dtype() != mx::float32) {
    invalid("float16, bfloat16 or float32. Received ", norm_.dtype());
  }
}

void Stack::add(Layer layer) {
  const Sizes& s = sizes_;
  check_vector("input_norm", layer.input_norm, s.hidden, dtype());
  check_vector("mlp_norm", layer.mlp_norm, s.hidden, dtype());
  for (auto* norm : {&layer.q_norm, &layer.k_norm}) {
    if (*norm) {
      check_vector("the norm of a head", **norm, s.head_dim, dtype());
    }
  }
  for (const Projection& p : layer.qkv) {
    check_projection("q, k and v", p, s.hidden);
    if (p.bias) {
      check_vector("a bias", *p.bias, p.N(), dtype());
    }
  }
  check_rows("q, k and v", layer.qkv, s.queries() + 2 * s.keys());
  check_projection("output", layer.output, s.queries());
  check_rows("output", {layer.output}, s.hidden);
  for (const Projection& p : layer.gate_up) {
    check_projection("gate and up", p, s.hidden);
  }
  check_rows("gate and up", layer.gate_up, 2 * s.inner);
  check_projection("down", layer.down, s.inner);
  check_rows("down", {layer.down}, s.hidden);
  layers_.push_back(std::move(layer));
}

// History

std::shared_ptr<History> begin_history(
    std::shared_ptr<const Stack> stack,
    const Arrays& keys,
    const Arrays& values,
    int length,
    mx::StreamOrDevice s) {
  const Sizes& sizes = stack->sizes();
  size_t layers = stack->layers().size();
  if (native_ops() || !has_kernels(mx::to_stream(s), sizes)) {
    return nullptr;
  }
  if (keys.size() != layers || values.size() != layers || length < 1) {
    return nullptr;
  }
  auto out = std::make_shared<History>();
  out->capacity = (length / growth + 1) * growth;
  mx::Shape room{1, sizes.kv_heads, out->capacity - length, sizes.head_dim};
  mx::Shape end{1, sizes.kv_heads, length, sizes.head_dim};
  array zeros = mx::zeros(room, stack->dtype(), s);
  for (auto* from : {&keys, &values}) {
    for (const array& a : *from) {
      if (a.ndim() != 4 || a.dtype() != stack->dtype() || a.shape(0) != 1 ||
          a.shape(1) != sizes.kv_heads || a.shape(2) < length ||
          a.shape(3) != sizes.head_dim || a.is_tracer()) {
        return nullptr;
      }
      array filled = mx::slice(a, {0, 0, 0, 0}, end, s);
      out->wanted.push_back(mx::concatenate({filled, zeros}, 2, s));
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
      std::make_shared<Step>(stream, history, position, !last),
      std::move(inputs));
}

std::pair<array, array> read_history(
    const std::shared_ptr<History>& history,
    int layer,
    const std::optional<array>& last,
    mx::StreamOrDevice s) {
  const Stack& stack = *history->stack;
  const Sizes& sizes = stack.sizes();
  if (!last) {
    return {
        history->wanted.at(layer),
        history->wanted.at(layer + stack.layers().size())};
  }
  auto make = [&](bool keys) {
    return array(
        {1, sizes.kv_heads, history->capacity, sizes.head_dim},
        stack.dtype(),
        std::make_shared<ReadHistory>(mx::to_stream(s), history, layer, keys),
        {*last});
  };
  return {make(true), make(false)};
}

} // namespace mlx_gguf
