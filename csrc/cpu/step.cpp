// A step in the CPU's operations, node by node: what the GPU's kernels are
// tested against, and how steps are tested where there is none.
#include <algorithm>
#include <cmath>

#include "cpu/fast.h"
#include "delta.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "ops.h"
#include "step.h"

namespace mlx_gguf::cpu {

namespace {

using Arrays = std::vector<array>;

// Evaluates a node after those it reads, as the scheduler would; the stream
// keeps them all until it has passed the step.
const array& run(const array& node, mx::Stream s) {
  if (node.has_primitive() && !node.data_shared_ptr()) {
    for (const array& in : node.inputs()) {
      run(in, s);
    }
    Arrays outputs = node.outputs();
    node.primitive().eval_cpu(node.inputs(), outputs);
    mx::cpu::get_command_encoder(s).add_temporary(node);
  }
  return node;
}

struct Token {
  const Sizes& sizes;
  int position;
  array cosines; // [pairs]
  array sines;
  mx::Stream s;

  array part(const array& a, int first, int last) const {
    mx::Shape from(a.ndim(), 0), to = a.shape();
    from.back() = first;
    to.back() = last;
    return mx::slice(a, from, to, s);
  }

  array norm(const array& x, const array& weight) const {
    return rms_norm(x, weight, sizes.eps, s).value();
  }

  array product(const array& x, const std::vector<Projection>& parts) const {
    Arrays out;
    for (const Projection& p : parts) {
      out.push_back(
          p.bias
              ? quantized_addmm(*p.bias, x, p.w, p.format->name, 1, 1, true, s)
              : quantized_matmul(x, p.w, p.format->name, true, s));
    }
    return mx::concatenate(out, -1, s);
  }

  array sum(const array& c, const array& x, const Projection& p) const {
    return quantized_addmm(c, x, p.w, p.format->name, 1, 1, true, s);
  }

  // [1, heads, 1, head_dim], normed and turned.
  array heads(
      const array& a,
      int first,
      int count,
      const std::optional<array>& weight) const {
    int D = sizes.head_dim;
    array out =
        mx::reshape(part(a, first, first + count * D), {1, count, 1, D}, s);
    return turned(weight ? norm(out, *weight) : out);
  }

  array turned(const array& a) const {
    int pairs = cosines.size(), D = a.shape(-1);
    array x = mx::astype(a, mx::float32, s);
    array rest = part(x, 2 * pairs, D);
    array both = part(x, 0, 2 * pairs);
    mx::Shape shape = both.shape(), split = shape;
    split.back() = sizes.traditional ? pairs : 2;
    split.push_back(sizes.traditional ? 2 : pairs);
    int axis = sizes.traditional ? -1 : -2;
    both = mx::reshape(both, split, s);
    array one = mx::take(both, 0, axis, s), two = mx::take(both, 1, axis, s);
    auto times = [&](const array& p, const array& q) {
      return mx::multiply(p, q, s);
    };
    array y = mx::stack(
        {mx::subtract(times(one, cosines), times(two, sines), s),
         mx::add(times(one, sines), times(two, cosines), s)},
        axis,
        s);
    y = mx::concatenate({mx::reshape(y, shape, s), rest}, -1, s);
    return mx::astype(y, a.dtype(), s);
  }

  // Writes a row of every head, [1, heads, 1, head_dim].
  void write(const array& row, array& history) const {
    array from = run(mx::contiguous(row, false, s), s);
    auto bytes = static_cast<int64_t>(row.shape(-1) * row.itemsize());
    mx::cpu::get_command_encoder(s).dispatch(
        [from = from.data<char>(),
         to = history.data<char>() + position * bytes,
         step = history.shape(2) * bytes,
         count = row.shape(1),
         bytes] {
          for (int64_t h = 0; h < count; ++h) {
            std::copy_n(from + h * bytes, bytes, to + h * step);
          }
        });
  }

  array attended(
      const array& n, const Layer& layer, array& keys, array& values) const {
    array qkv = product(n, layer.in), queries = qkv;
    int after_q = sizes.queries_and_gates(), after_k = after_q + sizes.keys();
    std::optional<array> gates;
    if (sizes.gated) {
      array both = mx::reshape(
          part(qkv, 0, after_q), {1, 1, sizes.heads, 2, sizes.head_dim}, s);
      queries = mx::reshape(mx::take(both, 0, 3, s), {1, 1, -1}, s);
      gates = mx::reshape(mx::take(both, 1, 3, s), {1, 1, -1}, s);
    }
    array q = heads(queries, 0, sizes.heads, layer.q_norm);
    write(heads(qkv, after_q, sizes.kv_heads, layer.k_norm), keys);
    write(
        mx::reshape(
            part(qkv, after_k, after_k + sizes.keys()),
            {1, sizes.kv_heads, 1, sizes.head_dim},
            s),
        values);
    mx::Shape end{1, sizes.kv_heads, position + 1, sizes.head_dim};
    auto filled = [&](const array& a) {
      return mx::slice(a, {0, 0, 0, 0}, end, s);
    };
    array y =
        attention(q, filled(keys), filled(values), sizes.scale, false, {}, s)
            .value();
    y = mx::reshape(y, {1, 1, sizes.queries()}, s);
    return gates ? mx::multiply(y, mx::sigmoid(*gates, s), s) : y;
  }

  // All bytes of an array, from a byte of another on.
  void overwrite(array& to, int64_t from, const array& with) const {
    const array source = run(mx::contiguous(with, false, s), s);
    mx::cpu::get_command_encoder(s).dispatch(
        [from = source.data<char>(),
         to = to.data<char>() + from,
         bytes = source.nbytes()] { std::copy_n(from, bytes, to); });
  }

  // A gated delta rule's part of a layer; step `number` of the history.
  array mixed(
      const array& n,
      const Layer& layer,
      array& window,
      array& state,
      int number) const {
    const DeltaSizes& d = sizes.delta;
    const DeltaLayer& own = *layer.delta;
    mx::Dtype dtype = n.dtype();
    auto f32 = [&](const array& a) { return mx::astype(a, mx::float32, s); };
    int D = d.head_dim, all_keys = d.key_heads * D;
    array in = product(n, layer.in);
    array before = mx::slice(
        window,
        {number % 2, 0, 0},
        {number % 2 + 1, d.taps - 1, d.channels()},
        s);
    array last = mx::concatenate({before, part(in, 0, d.channels())}, 1, s);
    array taps = mx::transpose(f32(own.taps), s);
    array x = mx::sum(mx::multiply(f32(last), taps, s), 1, true, s);
    x = mx::multiply(x, mx::sigmoid(x, s), s);
    auto heads = [&](int from, int count) {
      return mx::reshape(part(x, from, from + count * D), {1, 1, count, D}, s);
    };
    auto keys = [&](int from) {
      array a = heads(from, d.key_heads);
      if (d.tiled) {
        a = mx::concatenate(Arrays(d.heads / d.key_heads, a), 2, s);
      }
      array squares = mx::sum(mx::square(a, s), 3, true, s);
      return mx::multiply(
          a, mx::rsqrt(mx::add(squares, array(1e-6f), s), s), s);
    };
    array scale(1.0f / std::sqrt(static_cast<float>(D)));
    array q = mx::multiply(keys(0), scale, s), k = keys(all_keys);
    array v = heads(2 * all_keys, d.heads);
    array gates =
        mx::matmul(f32(n), mx::transpose(own.gates, s), s); // [1, 1, 2 heads]
    array a = mx::add(part(gates, 0, d.heads), own.dt_bias, s);
    array g = mx::multiply(
        mx::exp(own.a_log, s), mx::logaddexp(a, array(0.0f), s), s);
    auto [y, after] = mlx_gguf::gated_delta(
                          q,
                          k,
                          v,
                          mx::exp(mx::negative(g, s), s),
                          mx::sigmoid(part(gates, d.heads, 2 * d.heads), s),
                          state,
                          {},
                          s)
                          .value();
    y = rms_norm(y, f32(own.norm), sizes.eps, s).value();
    array z = f32(part(in, d.channels(), d.channels() + d.values()));
    z = gate(z, false, s).value();
    y = mx::multiply(mx::reshape(y, {1, 1, d.values()}, s), z, s);
    y = run(mx::astype(y, dtype, s), s);
    int64_t slot = (number + 1) % 2;
    array next = mx::slice(last, {0, 1, 0}, {1, d.taps, d.channels()}, s);
    overwrite(window, slot * static_cast<int64_t>(next.nbytes()), next);
    overwrite(state, 0, after);
    return y;
  }

  // SiLU of the first half times the second.
  array gated(const array& both) const {
    int inner = both.shape(-1) / 2;
    return mx::multiply(
        gate(part(both, 0, inner), false, s).value(),
        part(both, inner, 2 * inner),
        s);
  }

  // h and what its experts make of n, the shared one last.
  array mixture(const array& h, const array& n, const Layer& layer) const {
    const ExpertSizes& e = sizes.experts;
    const ExpertLayer& own = *layer.experts;
    auto f32 = [&](const array& a) { return mx::astype(a, mx::float32, s); };
    array logits = mx::matmul(
        mx::reshape(f32(n), {1, sizes.hidden}, s),
        mx::transpose(own.router, s),
        s);
    array scores = mx::softmax(part(logits, 0, e.count), -1, true, s);
    array order = mx::argsort(mx::negative(scores, s), -1, s);
    array chosen = mx::reshape(part(order, 0, e.used), {e.used}, s);
    scores = mx::take(mx::reshape(scores, {e.count}, s), chosen, 0, s);
    if (e.normalised) {
      scores = mx::divide(scores, mx::sum(scores, true, s), s);
    }
    auto experts = [&](const array& x, const Projection& p) {
      return gather_qmm(x, p.w, p.format->name, {}, chosen, true, false, s);
    };
    array x = mx::reshape(n, {1, 1, sizes.hidden}, s);
    Arrays both;
    for (const Projection& p : own.gate_up) {
      both.push_back(experts(x, p));
    }
    array y = experts(gated(mx::concatenate(both, -1, s)), own.down);
    y = mx::multiply(f32(y), mx::reshape(scores, {e.used, 1, 1}, s), s);
    y = mx::sum(y, 0, true, s);
    if (layer.down) {
      array shared = product(gated(product(n, layer.gate_up)), {*layer.down});
      array share = mx::sigmoid(part(logits, e.count, e.count + 1), s);
      y = mx::add(y, mx::multiply(f32(shared), share, s), s);
    }
    y = mx::reshape(y, h.shape(), s);
    return mx::astype(mx::add(f32(h), y, s), h.dtype(), s);
  }
};

} // namespace

void step(
    const array& x,
    array& out,
    const std::shared_ptr<History>& history,
    int position,
    int number,
    mx::Stream s) {
  const Stack& stack = *history->stack;
  std::vector<float> turns = turns_at(stack.sizes(), position);
  int pairs = static_cast<int>(turns.size() / 2);
  Token token{
      stack.sizes(),
      position,
      array(turns.data(), {pairs}),
      array(turns.data() + pairs, {pairs}),
      s};
  array h = x;
  for (size_t i = 0; i < stack.layers().size(); ++i) {
    const Layer& layer = stack.layers()[i];
    array n = token.norm(h, layer.input_norm);
    array &first = history->first[i], &second = history->second[i];
    array mixed = layer.delta ? token.mixed(n, layer, first, second, number)
                              : token.attended(n, layer, first, second);
    h = token.sum(h, mixed, layer.output);
    n = token.norm(h, layer.mlp_norm);
    h = layer.experts
            ? token.mixture(h, n, layer)
            : token.sum(
                  h, token.gated(token.product(n, layer.gate_up)), *layer.down);
  }
  h = run(token.norm(h, stack.norm()), s);
  out.copy_shared_buffer(h, out.strides(), h.flags(), h.data_size());
  mx::cpu::get_command_encoder(s).dispatch([history] {});
}

} // namespace mlx_gguf::cpu
