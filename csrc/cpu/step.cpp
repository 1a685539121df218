// A step in the CPU's operations, node by node: what the GPU's kernels are
// tested against, and how steps are tested where there is none.
#include <algorithm>

#include "cpu/fast.h"
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
    array qkv = product(n, layer.qkv);
    int after_q = sizes.queries(), after_k = after_q + sizes.keys();
    array q = heads(qkv, 0, sizes.heads, layer.q_norm);
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
    return mx::reshape(y, {1, 1, sizes.queries()}, s);
  }

  array gated(const array& n, const Layer& layer) const {
    array both = product(n, layer.gate_up);
    return mx::multiply(
        gate(part(both, 0, sizes.inner), false, s).value(),
        part(both, sizes.inner, 2 * sizes.inner),
        s);
  }
};

} // namespace

void step(
    const array& x,
    array& out,
    const std::shared_ptr<History>& history,
    int position,
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
    array attended = token.attended(
        token.norm(h, layer.input_norm),
        layer,
        history->keys[i],
        history->values[i]);
    h = token.sum(h, attended, layer.output);
    h = token.sum(
        h, token.gated(token.norm(h, layer.mlp_norm), layer), layer.down);
  }
  h = run(token.norm(h, stack.norm()), s);
  out.copy_shared_buffer(h, out.strides(), h.flags(), h.data_size());
  mx::cpu::get_command_encoder(s).dispatch([history] {});
}

} // namespace mlx_gguf::cpu
