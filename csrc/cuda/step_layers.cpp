// The kernels of a step, layer by layer: eight or more, for each projection of
// a type of its own, and some fourteen with a mixture of experts.
#include "cuda/workspace.h"

namespace mlx_gguf::cuda {

namespace {

// N numbers of a row, from `first` on.
array part_of(const array& row, int64_t first, int N) {
  array out({1, N}, row.dtype(), nullptr, {});
  out.copy_shared_buffer(row, out.strides(), row.flags(), out.size(), first);
  return out;
}

} // namespace

void Workspace::layers(mx::Stream s) {
  for (size_t i = 0; i < stack_.layers().size(); ++i) {
    const Layer& layer = stack_.layers()[i];
    norm(h_, fixed(layer.input_norm), normed_, s);
    product(layer.in, normed_, {}, in_, s);
    const array &first = history_.first[i], &second = history_.second[i];
    if (layer.delta) {
      delta(*layer.delta, first, second, s);
    } else {
      attend(layer, first, second, s);
    }
    product({layer.output}, mixed_, h_, middle_, s);
    norm(middle_, fixed(layer.mlp_norm), normed_, s);
    if (layer.experts) {
      mixture(layer, s);
    } else {
      mlp(layer, s);
      product({*layer.down}, gated_, middle_, h_, s);
    }
  }
}

// But for the last product.
void Workspace::mlp(const Layer& layer, mx::Stream s) {
  product(layer.gate_up, normed_, {}, gate_up_, s);
  gate(gate_up_, gated_, 1, s);
}

void Workspace::mixture(const Layer& layer, mx::Stream s) {
  const ExpertLayer& own = *layer.experts;
  void *x = mx::gpu_ptr<void>(normed_), *router = fixed(own.router);
  void *logits = mx::gpu_ptr<void>(logits_), *h = mx::gpu_ptr<void>(middle_);
  void* chosen = mx::gpu_ptr<void>(chosen_);
  void* shares = mx::gpu_ptr<void>(shares_);
  void* done = mx::gpu_ptr<uint32_t>(done_) + sizes_.heads;
  route_told_.rows = static_cast<uint32_t>(own.router.shape(0));
  auto blocks = [](int64_t a, int64_t b) {
    return static_cast<unsigned>(ceil_div(a, b));
  };
  enqueue(
      route_kernel_,
      {.grid = {blocks(route_told_.rows, route_warps), 1, 1},
       .block = {32 * route_warps, 1, 1},
       .early = starts_early()},
      {},
      logits_,
      {&x, &router, &logits, &chosen, &shares, &done, &route_told_},
      s);
  of_experts(own.gate_up, normed_, both_, s);
  gate(both_, inner_, sizes_.experts.used, s);
  of_experts({own.down}, inner_, made_, s);
  void* shared = nullptr;
  if (layer.down) {
    mlp(layer, s);
    product({*layer.down}, gated_, {}, shared_, s);
    shared = mx::gpu_ptr<void>(shared_);
  }
  void *made = mx::gpu_ptr<void>(made_), *y = mx::gpu_ptr<void>(h_);
  auto N = static_cast<uint32_t>(sizes_.hidden);
  enqueue(
      combine_kernel_,
      {.grid = {blocks(N, 8 * combine_threads), 1, 1},
       .block = {combine_threads, 1, 1},
       .early = starts_early()},
      {},
      h_,
      {&h, &made, &shared, &shares, &y, &N, &route_told_.used},
      s);
}

// Of each chosen expert, with rows of x in turn or with the only one; outputs
// of one expert lie one after the other.
void Workspace::of_experts(
    const std::vector<Projection>& parts,
    const array& x,
    const array& out,
    mx::Stream s) {
  int used = sizes_.experts.used, experts = sizes_.experts.count;
  int64_t first = 0;
  for (const Projection& part : parts) {
    const Format& format = *part.format;
    Operands in{aligned(part.w, format.alignment, s), x, {}, pairs_, chosen_};
    fixed(*in.w);
    auto p = params_of<Params>(*in.w, format);
    p.M = p.gather = 1;
    p.last_x = static_cast<uint32_t>(x.size() / p.K - 1);
    p.last_w = static_cast<uint32_t>(experts - 1);
    p.x_step = p.K;
    p.y_step = out.size() / used;
    bool copies = place_of(*in.w) % 16 == 0;
    Plan plan = choose_gather(
        format,
        x.dtype(),
        1,
        p.N,
        p.K,
        used,
        experts,
        false,
        true,
        copies,
        gpu());
    array y = part_of(out, first, part.N());
    first += part.N();
    launch(plan, format, p, in, y, used, experts, s);
  }
}

// Products that write one after the other; c is added.
void Workspace::product(
    const std::vector<Projection>& parts,
    const array& x,
    const std::optional<array>& c,
    const array& out,
    mx::Stream s) {
  int64_t first = 0;
  for (const Projection& part : parts) {
    const Format& format = *part.format;
    Operands in{aligned(part.w, format.alignment, s), x, c ? c : part.bias};
    fixed(*in.w);
    if (part.bias) {
      fixed(*part.bias);
    }
    auto p = params_of<Params>(*in.w, format);
    p.M = 1;
    p.w_step = 0;
    p.y_step = p.c_step = p.N;
    p.has_c = in.c.has_value();
    bool copies = place_of(*in.w) % 16 == 0;
    Plan plan = choose(format, x.dtype(), 1, p.N, p.K, 1, true, copies, gpu());
    array y = part_of(out, first, part.N());
    first += part.N();
    launch(plan, format, p, in, y, 1, 1, s);
  }
}

void Workspace::norm(const array& x, void* weight, array& out, mx::Stream s) {
  auto N = static_cast<uint32_t>(x.size());
  float eps = sizes_.eps;
  void *from = mx::gpu_ptr<void>(x), *to = mx::gpu_ptr<void>(out);
  auto threads =
      static_cast<unsigned>(std::min<int64_t>(1024, 32 * ceil_div(N / 8, 32)));
  enqueue(
      norm_kernel_,
      {.grid = {1, 1, 1}, .block = {threads, 1, 1}, .early = starts_early()},
      {},
      out,
      {&from, &weight, &to, &N, &eps},
      s);
}

void Workspace::attend(
    const Layer& layer, const array& keys, const array& values, mx::Stream s) {
  void *qkv = mx::gpu_ptr<void>(in_), *y = mx::gpu_ptr<void>(mixed_);
  void* q_norm = layer.q_norm ? fixed(*layer.q_norm) : nullptr;
  void* k_norm = layer.k_norm ? fixed(*layer.k_norm) : nullptr;
  void *k = fixed(keys), *v = fixed(values);
  void *partial = mx::gpu_ptr<void>(partial_), *done = mx::gpu_ptr<void>(done_);
  void* params = mx::gpu_ptr<void>(params_);
  auto heads = static_cast<unsigned>(sizes_.heads / plan_.heads);
  auto blocks = static_cast<unsigned>(most_blocks_);
  enqueue(
      attend_kernel_,
      {.grid = {heads, blocks, 1},
       .block = {32 * attend_warps, 1, 1},
       .early = starts_early()},
      {},
      mixed_,
      {&qkv, &q_norm, &k_norm, &k, &v, &y, &partial, &done, &params},
      s);
}

void Workspace::delta(
    const DeltaLayer& layer,
    const array& window,
    const array& states,
    mx::Stream s) {
  void *x = mx::gpu_ptr<void>(normed_), *in = mx::gpu_ptr<void>(in_);
  void *y = mx::gpu_ptr<void>(mixed_), *params = mx::gpu_ptr<void>(params_);
  void *gates = fixed(layer.gates), *taps = fixed(layer.taps);
  void *dt_bias = fixed(layer.dt_bias), *a_log = fixed(layer.a_log);
  void* weight = fixed(layer.norm);
  void *inputs = fixed(window), *state = fixed(states);
  auto heads = static_cast<unsigned>(sizes_.delta.heads);
  auto threads = delta_lanes * static_cast<unsigned>(sizes_.delta.head_dim);
  enqueue(
      delta_kernel_,
      {.grid = {heads, 1, 1},
       .block = {threads, 1, 1},
       .early = starts_early()},
      {},
      mixed_,
      {&x,
       &in,
       &gates,
       &taps,
       &dt_bias,
       &a_log,
       &weight,
       &inputs,
       &state,
       &y,
       &params,
       &delta_told_},
      s);
}

void Workspace::gate(array& x, array& y, int64_t rows, mx::Stream s) {
  auto N = static_cast<uint32_t>(static_cast<int64_t>(y.size()) / rows);
  void *from = mx::gpu_ptr<void>(x), *to = mx::gpu_ptr<void>(y);
  auto blocks = static_cast<unsigned>(ceil_div(N / 8, 256));
  auto count = static_cast<unsigned>(rows);
  enqueue(
      gate_kernel_,
      {.grid = {blocks, count, 1},
       .block = {256, 1, 1},
       .early = starts_early()},
      {},
      y,
      {&from, &to, &N},
      s);
}

} // namespace mlx_gguf::cuda
