#include "delta.h"

#include <memory>

#include "cuda/backend.h"
#include "derivatives.h"
#include "export.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"

namespace mlx_gguf {

namespace {

using Arrays = std::vector<array>;

// In MLX's own operations, token by token: what derivatives are taken of.
Arrays spelled_out(const Arrays& in, mx::Stream s) {
  DeltaShape n(in);
  auto all_heads = [&](const array& a) {
    return mx::repeat(a, n.heads / n.key_heads, 2, s);
  };
  array q = all_heads(in[0]), k = all_heads(in[1]), state = in[5];
  Arrays ys;
  for (int t = 0; t < n.tokens; ++t) {
    auto token = [&](const array& a) { return mx::take(a, t, 1, s); };
    auto row = [&](const array& a) { return mx::expand_dims(token(a), 2, s); };
    auto column = [&](const array& a) { return mx::expand_dims(a, 3, s); };
    array g = mx::reshape(token(in[3]), {n.batch, n.heads, 1, 1}, s);
    array before = state;
    state = mx::multiply(state, g, s);
    array old = mx::sum(mx::multiply(state, row(k), s), 3, false, s);
    array delta = mx::multiply(
        mx::subtract(token(in[2]), old, s),
        mx::expand_dims(token(in[4]), 2, s),
        s);
    state = mx::add(state, mx::multiply(column(delta), row(k), s), s);
    array y = mx::sum(mx::multiply(state, row(q), s), 3, false, s);
    if (in.size() == 7) {
      array counts = mx::reshape(token(in[6]), {n.batch, 1, 1}, s);
      y = mx::where(counts, y, array(0.0f), s);
      state = mx::where(mx::expand_dims(counts, 3, s), state, before, s);
    }
    ys.push_back(mx::astype(y, in[0].dtype(), s));
  }
  return {mx::stack(ys, 1, s), state};
}

// inputs: q, k, v, g, beta, state and, where there is one, the mask.
class GatedDelta : public mx::Primitive {
 public:
  using Primitive::Primitive;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    cpu::gated_delta(inputs, outputs, stream());
  }
  void eval_gpu(const Arrays& inputs, Arrays& outputs) override {
    cuda::loaded()->gated_delta(inputs, outputs, stream());
  }
  Arrays vjp(
      const Arrays& primals,
      const Arrays& cotangents,
      const std::vector<int>& argnums,
      const Arrays&) override {
    return derivatives(primals, argnums).vjp(cotangents);
  }
  Arrays jvp(
      const Arrays& primals,
      const Arrays& tangents,
      const std::vector<int>& argnums) override {
    return derivatives(primals, argnums).jvp(tangents);
  }
  // More sequences of one call.
  std::pair<Arrays, std::vector<int>> vmap(
      const Arrays& inputs, const std::vector<int>& axes) override;
  const char* name() const override {
    return "GGUFGatedDelta";
  }
  bool is_equivalent(const Primitive&) const override {
    return true;
  }
  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return {inputs[2].shape(), inputs[5].shape()};
  }

 private:
  Derivatives derivatives(
      const Arrays& primals, const std::vector<int>& argnums) {
    auto function = [s = stream()](const Arrays& in) {
      return spelled_out(in, s);
    };
    return {function, primals, argnums};
  }
};

bool fits(const Arrays& in, const std::optional<array>& mask) {
  const array &q = in[0], &k = in[1], &v = in[2], &g = in[3], &beta = in[4];
  mx::Dtype dtype = q.dtype();
  bool number =
      dtype == mx::float16 || dtype == mx::bfloat16 || dtype == mx::float32;
  if (!number || k.dtype() != dtype || v.dtype() != dtype ||
      beta.dtype() != dtype || g.dtype() != mx::float32 ||
      in[5].dtype() != mx::float32 || q.ndim() != 4 || k.ndim() != 4 ||
      v.ndim() != 4) {
    return false;
  }
  DeltaShape n(in);
  mx::Shape keys{n.batch, n.tokens, n.key_heads, n.width};
  mx::Shape gates{n.batch, n.tokens, n.heads};
  return q.shape() == keys && k.shape() == keys && g.shape() == gates &&
         beta.shape() == gates &&
         in[5].shape() == mx::Shape{n.batch, n.heads, n.rows, n.width} &&
         (!mask || (mask->dtype() == mx::bool_ &&
                    mask->shape() == mx::Shape{n.batch, n.tokens})) &&
         v.size() > 0 && n.key_heads > 0 && n.heads % n.key_heads == 0 &&
         n.width > 0 && n.width % delta_width == 0 &&
         n.width <= most_delta_width && n.rows % delta_rows == 0;
}

std::pair<Arrays, std::vector<int>> GatedDelta::vmap(
    const Arrays& inputs, const std::vector<int>& axes) {
  int count = 1;
  for (size_t i = 0; i < inputs.size(); ++i) {
    count = axes[i] < 0 ? count : inputs[i].shape(axes[i]);
  }
  Arrays all;
  for (size_t i = 0; i < inputs.size(); ++i) {
    array a = axes[i] < 0 ? mx::expand_dims(inputs[i], 0, stream())
                          : mx::moveaxis(inputs[i], axes[i], 0, stream());
    mx::Shape shape = a.shape();
    shape[0] = count;
    a = mx::broadcast_to(a, shape, stream());
    all.push_back(mx::flatten(a, 0, 1, stream()));
  }
  Arrays out = array::make_arrays(
      {all[2].shape(), all[5].shape()},
      {all[0].dtype(), mx::float32},
      std::make_shared<GatedDelta>(stream()),
      all);
  for (array& a : out) {
    a = mx::unflatten(a, 0, {count, -1}, stream());
  }
  return {out, {0, 0}};
}

} // namespace

std::optional<std::pair<array, array>> gated_delta(
    const array& q,
    const array& k,
    const array& v,
    const array& g,
    const array& beta,
    const array& state,
    const std::optional<array>& mask,
    mx::StreamOrDevice s) {
  mx::Stream stream = mx::to_stream(s);
  bool here = stream.device == mx::Device::cpu || cuda::loaded();
  Arrays inputs{q, k, v, g, beta, state};
  if (native_ops() || !here || !fits(inputs, mask)) {
    return std::nullopt;
  }
  if (mask) {
    inputs.push_back(*mask);
  }
  Arrays out = array::make_arrays(
      {v.shape(), state.shape()},
      {q.dtype(), mx::float32},
      std::make_shared<GatedDelta>(stream),
      inputs);
  return std::pair{out[0], out[1]};
}

} // namespace mlx_gguf
