#include "cpu/fast.h"

#include <cmath>
#include <memory>
#include <optional>
#include <stdexcept>

#include "cpu/fast_task.h"
#include "export.h"
#include "mlx/fast.h"
#include "mlx/transforms.h"

namespace mlx_gguf::cpu {

namespace {

using Arrays = std::vector<array>;

void rms_norm_rows(
    const View& x, const std::optional<View>& weight, float eps, Target out) {
  int64_t n = x.shape.back(), rows = 1;
  for (int size : x.shape) {
    rows *= size;
  }
  rows /= n;
  Buffer weights(weight ? n * sizeof(float) : 0);
  const float* w = weight ? weight->floats(0, floats_of(weights)) : nullptr;
  for_parts(rows, n, [&](int64_t first, int64_t last) {
    Buffer scratch(2 * n * sizeof(float));
    for (int64_t r = first; r < last; ++r) {
      const float* in = x.floats(x.row(r), floats_of(scratch));
      float* y = out.floats(r * n, floats_of(scratch) + n);
      isa().fast.rms_norm(in, w, eps, n, y);
      out.write(y, r * n, n);
    }
  });
}

// How fast each pair turns, padded. Threads remember the last ones that
// they made: a model asks for the same again and again.
const std::vector<double>& speeds_of(int dims, float base) {
  thread_local int last_dims = 0;
  thread_local float last_base = 0.0f;
  thread_local std::vector<double> speeds;
  if (last_dims != dims || last_base != base) {
    int half = dims / 2;
    speeds.assign(padded(half), 0.0);
    for (int i = 0; i < half; ++i) {
      speeds[i] = std::pow(static_cast<double>(base), -double(i) / half);
    }
    last_dims = dims;
    last_base = base;
  }
  return speeds;
}

std::vector<double> speeds_of(const View& freqs) {
  int64_t half = freqs.shape.back();
  std::vector<float> values(half);
  freqs.read(0, freqs.step(), half, values.data());
  std::vector<double> speeds(padded(half), 0.0);
  for (int64_t i = 0; i < half; ++i) {
    speeds[i] = 1.0 / values[i];
  }
  return speeds;
}

struct RopeTask {
  RopeState state;
  View x;
  std::optional<View> offset;
  bool unsigned_offset;
  std::optional<View> freqs;
  Target out;

  double first_position(int64_t batch) const {
    if (!offset) {
      return *state.offset;
    }
    int64_t at = offset->shape.size() == 1 && offset->shape[0] > 1
                     ? batch * offset->strides[0]
                     : 0;
    return unsigned_offset
               ? double(reinterpret_cast<const uint32_t*>(offset->data)[at])
               : double(reinterpret_cast<const int32_t*>(offset->data)[at]);
  }

  void operator()() const {
    const std::vector<double>& speeds =
        freqs ? speeds_of(*freqs) : speeds_of(state.dims, *state.base);
    int64_t T = x.shape[x.shape.size() - 2], D = x.shape.back();
    int64_t heads = 1;
    for (size_t axis = 1; axis + 2 < x.shape.size(); ++axis) {
      heads *= x.shape[axis];
    }
    int64_t half = state.dims / 2, wide = padded(half);
    auto some = [&](int64_t first, int64_t last) {
      Buffer scratch((2 * wide + 2 * D) * sizeof(float));
      float* cos = floats_of(scratch);
      float* sin = cos + wide;
      for (int64_t i = first; i < last; ++i) {
        int64_t batch = i / T, t = i % T;
        double position = (first_position(batch) + t) * state.scale;
        isa().fast.rotations(position, speeds.data(), wide, cos, sin);
        for (int64_t h = 0; h < heads; ++h) {
          turn((batch * heads + h) * T + t, cos, sin, sin + wide);
        }
      }
    };
    for_parts(x.shape[0] * T, heads * D, some);
  }

  void turn(
      int64_t row, const float* cos, const float* sin, float* scratch) const {
    int64_t D = x.shape.back();
    const float* in = x.floats(x.row(row), scratch);
    float* y = out.floats(row * D, scratch + D);
    isa().fast.rotate(in, cos, sin, state.dims / 2, state.traditional, y);
    std::copy(in + state.dims, in + D, y + state.dims);
    out.write(y, row * D, D);
  }
};

} // namespace

std::optional<mx::Stream> our_stream(mx::StreamOrDevice s) {
  if (native_ops()) {
    return std::nullopt;
  }
  mx::Stream stream = mx::to_stream(s);
  return stream.device == mx::Device::cpu ? std::optional(stream)
                                          : std::nullopt;
}

// Fast

void Fast::eval_gpu(const Arrays&, array&) {
  throw std::runtime_error(
      std::string("[") + name() +
      "] Expected a stream on the CPU. Received one on a GPU.");
}

Derivatives Fast::derivatives(
    const Arrays& primals, const std::vector<int>& argnums) {
  auto function = [this](const Arrays& in) { return Arrays{spelled_out(in)}; };
  return {function, primals, argnums};
}

Arrays Fast::jvp(
    const Arrays& primals,
    const Arrays& tangents,
    const std::vector<int>& argnums) {
  return derivatives(primals, argnums).jvp(tangents);
}

Arrays Fast::vjp(
    const Arrays& primals,
    const Arrays& cotangents,
    const std::vector<int>& argnums,
    const Arrays&) {
  return derivatives(primals, argnums).vjp(cotangents);
}

std::pair<Arrays, std::vector<int>> Fast::vmap(
    const Arrays& inputs, const std::vector<int>& axes) {
  auto fun = [this](const Arrays& all) { return Arrays{spelled_out(all)}; };
  return {mx::vmap(fun, axes)(inputs), {0}};
}

// RmsNorm

std::optional<array> rms_norm(
    const array& x,
    const std::optional<array>& weight,
    float eps,
    mx::StreamOrDevice s) {
  auto stream = our_stream(s);
  if (!stream || !is_number(x.dtype()) || x.ndim() == 0) {
    return std::nullopt;
  }
  Arrays inputs{x};
  mx::Dtype dtype = x.dtype();
  if (weight) {
    if (!is_number(weight->dtype()) || weight->ndim() != 1 ||
        weight->shape(0) != x.shape(-1)) {
      return std::nullopt;
    }
    inputs.push_back(*weight);
    dtype = mx::result_type(x, *weight);
  }
  return array(
      x.shape(),
      dtype,
      std::make_shared<RmsNorm>(*stream, eps),
      std::move(inputs));
}

void RmsNorm::eval_cpu(const Arrays& inputs, array& out) {
  out.set_data(mx::allocator::malloc(out.nbytes()));
  if (out.size() == 0) {
    return;
  }
  std::optional<View> weight;
  if (inputs.size() == 2) {
    weight.emplace(inputs[1]);
  }
  enqueue(
      inputs,
      out,
      stream(),
      [x = View(inputs[0]), weight, eps = eps_, to = Target(out)] {
        rms_norm_rows(x, weight, eps, to);
      });
}

array RmsNorm::spelled_out(const Arrays& inputs) {
  auto weight = inputs.size() == 2 ? std::optional(inputs[1]) : std::nullopt;
  return mx::fast::rms_norm(inputs[0], weight, eps_, stream());
}

bool RmsNorm::is_equivalent(const mx::Primitive& other) const {
  return eps_ == static_cast<const RmsNorm&>(other).eps_;
}

// Rope

std::optional<array> rope(
    const array& x,
    int dims,
    bool traditional,
    std::optional<float> base,
    float scale,
    const std::variant<int, array>& offset,
    const std::optional<array>& freqs,
    mx::StreamOrDevice s) {
  auto stream = our_stream(s);
  if (!stream || !is_number(x.dtype()) || x.ndim() < 3 || dims <= 0 ||
      dims % 2 != 0 || dims > x.shape(-1) ||
      base.has_value() == freqs.has_value()) {
    return std::nullopt;
  }
  Arrays inputs{x};
  RopeState state{dims, traditional, base, scale, std::nullopt};
  if (auto number = std::get_if<int>(&offset)) {
    state.offset = *number;
  } else {
    const array& a = std::get<array>(offset);
    if ((a.dtype() != mx::int32 && a.dtype() != mx::uint32) || a.ndim() > 1 ||
        (a.size() != 1 && a.size() != static_cast<size_t>(x.shape(0)))) {
      return std::nullopt;
    }
    inputs.push_back(a);
  }
  if (freqs) {
    if (!is_number(freqs->dtype()) || freqs->ndim() != 1 ||
        freqs->shape(0) != dims / 2) {
      return std::nullopt;
    }
    inputs.push_back(*freqs);
  }
  return array(
      x.shape(),
      x.dtype(),
      std::make_shared<Rope>(*stream, state),
      std::move(inputs));
}

void Rope::eval_cpu(const Arrays& inputs, array& out) {
  out.set_data(mx::allocator::malloc(out.nbytes()));
  if (out.size() == 0) {
    return;
  }
  RopeTask task{
      state_, View(inputs[0]), std::nullopt, false, std::nullopt, Target(out)};
  if (!state_.offset) {
    task.offset.emplace(inputs[1]);
    task.unsigned_offset = inputs[1].dtype() == mx::uint32;
  }
  if (!state_.base) {
    task.freqs.emplace(inputs.back());
  }
  enqueue(inputs, out, stream(), std::move(task));
}

array Rope::spelled_out(const Arrays& inputs) {
  auto freqs = state_.base ? std::nullopt : std::optional(inputs.back());
  auto& [dims, traditional, base, scale, offset] = state_;
  return offset ? mx::fast::rope(
                      inputs[0],
                      dims,
                      traditional,
                      base,
                      scale,
                      *offset,
                      freqs,
                      stream())
                : mx::fast::rope(
                      inputs[0],
                      dims,
                      traditional,
                      base,
                      scale,
                      inputs[1],
                      freqs,
                      stream());
}

bool Rope::is_equivalent(const mx::Primitive& other) const {
  return state_ == static_cast<const Rope&>(other).state_;
}

} // namespace mlx_gguf::cpu
