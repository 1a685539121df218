// What a model's layers must be.
#include <sstream>
#include <stdexcept>

#include "delta.h"
#include "step.h"

namespace mlx_gguf {

namespace {

template <typename... Parts>
[[noreturn]] void invalid(const Parts&... parts) {
  std::ostringstream msg;
  msg << "[Stack] Expected ";
  (msg << ... << parts);
  throw std::invalid_argument(msg.str() + ".");
}

void check_array(
    const char* name, const array& a, const mx::Shape& shape, mx::Dtype dtype) {
  if (a.shape() != shape || a.dtype() != dtype) {
    invalid(
        name,
        " of shape ",
        shape,
        " and dtype ",
        dtype,
        ". Received shape ",
        a.shape(),
        " and dtype ",
        a.dtype());
  }
}

void check_vector(const char* name, const array& a, int size, mx::Dtype dtype) {
  check_array(name, a, {size}, dtype);
}

void check_projection(
    const char* name, const Projection& p, int K, int experts = 1) {
  const Format& format = *p.format;
  if (p.w.ndim() < 2 || p.w.dtype() != mx::uint8 || !format.packed() ||
      p.w.shape(-1) % format.block_bytes != 0 || p.K() != K || p.w.ndim() > 3 ||
      (p.w.ndim() == 3 ? p.w.shape(0) : 1) != experts) {
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

} // namespace

Stack::Stack(Sizes sizes, array norm)
    : sizes_(std::move(sizes)), norm_(std::move(norm)) {
  const Sizes& s = sizes_;
  if (s.hidden < 1 || s.inner < 0 || s.kv_heads < 1 || s.head_dim < 1 ||
      s.heads < 1 || s.heads % s.kv_heads != 0) {
    invalid(
        "sizes and heads in groups. Received hidden ",
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
  const DeltaSizes& d = s.delta;
  if (d.heads != 0 &&
      (d.heads < 1 || d.key_heads < 1 || d.heads % d.key_heads != 0 ||
       d.head_dim < 1 || d.head_dim % delta_width != 0 ||
       d.head_dim > most_delta_width || d.taps < 2)) {
    invalid(
        "delta rules of heads in groups, with multiples of ",
        delta_width,
        " numbers up to ",
        most_delta_width,
        ", and of 2 taps or more. Received ",
        d.heads,
        " heads for ",
        d.key_heads,
        " of keys, head_dim ",
        d.head_dim,
        " and ",
        d.taps,
        " taps");
  }
  const ExpertSizes& e = s.experts;
  if (e.count != 0 &&
      (e.count < 1 || e.used < 1 || e.used > e.count || e.inner < 1)) {
    invalid(
        "experts with an inner size, of which some are used. Received ",
        e.count,
        " with inner ",
        e.inner,
        ", of which ",
        e.used,
        " are used");
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
  for (const Projection& p : layer.in) {
    check_projection("q, k and v", p, s.hidden);
    if (p.bias) {
      check_vector("a bias", *p.bias, p.N(), dtype());
    }
  }
  if (layer.delta) {
    const DeltaSizes& d = s.delta;
    check_rows("q, k, v and z", layer.in, d.channels() + d.values());
    check_array(
        "gates", layer.delta->gates, {2 * d.heads, s.hidden}, mx::float32);
    check_array("taps", layer.delta->taps, {d.channels(), d.taps}, dtype());
    check_vector("dt_bias", layer.delta->dt_bias, d.heads, mx::float32);
    check_vector("a_log", layer.delta->a_log, d.heads, mx::float32);
    check_vector("the norm of a head", layer.delta->norm, d.head_dim, dtype());
    check_projection("output", layer.output, d.values());
  } else {
    check_rows("q, k and v", layer.in, s.queries_and_gates() + 2 * s.keys());
    check_projection("output", layer.output, s.queries());
  }
  check_rows("output", {layer.output}, s.hidden);
  for (const Projection& p : layer.gate_up) {
    check_projection("gate and up", p, s.hidden);
  }
  check_rows("gate and up", layer.gate_up, layer.down ? 2 * s.inner : 0);
  if (layer.down) {
    check_projection("down", *layer.down, s.inner);
    check_rows("down", {*layer.down}, s.hidden);
  } else if (!layer.experts) {
    invalid("an MLP or experts in every layer. Received neither");
  }
  if (layer.experts) {
    const ExpertSizes& e = s.experts;
    const ExpertLayer& own = *layer.experts;
    int rows = layer.down ? e.count + 1 : e.count;
    check_array("the router", own.router, {rows, s.hidden}, mx::float32);
    for (const Projection& p : own.gate_up) {
      check_projection("experts' gate and up", p, s.hidden, e.count);
    }
    check_rows("experts' gate and up", own.gate_up, 2 * e.inner);
    check_projection("experts' down", own.down, e.inner, e.count);
    check_rows("experts' down", {own.down}, s.hidden);
  }
  layers_.push_back(std::move(layer));
}

} // namespace mlx_gguf
