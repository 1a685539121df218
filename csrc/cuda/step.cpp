// One token through all layers: eight kernels each, recorded once as a graph
// that every token launches. What differs between tokens is in memory.
#include "step.h"

#include <numeric>

#include "cuda/attend.h"
#include "cuda/launch.h"
#include "cuda/names.h"
#include "gpu/batch.h"
#include "gpu/nodes.h"
#include "mlx/allocator.h"
#include "mlx/backend/cuda/utils.h"

namespace mlx_gguf::cuda {

namespace {

CUdeviceptr place_of(const array& a) {
  return reinterpret_cast<CUdeviceptr>(mx::gpu_ptr<void>(a));
}

// Arrays in one piece of memory.
class Memory {
 public:
  array piece(int64_t N, mx::Dtype dtype) {
    pieces_.push_back(array({1, static_cast<int>(N)}, dtype, nullptr, {}));
    return pieces_.back();
  }
  // To be called once, after the last piece; gives all of them their data.
  void allocate(mx::Stream s) {
    constexpr int64_t alignment = 256;
    auto rounded = [](const array& a) {
      return ceil_div(static_cast<int64_t>(a.nbytes()), alignment) * alignment;
    };
    int64_t size = 0, used = 0;
    for (const array& a : pieces_) {
      size += rounded(a);
    }
    array whole = device_memory(size, s);
    for (array& a : pieces_) {
      a.copy_shared_buffer(
          whole,
          a.strides(),
          {.contiguous = true, .row_contiguous = true, .col_contiguous = true},
          a.size(),
          used / static_cast<int64_t>(a.itemsize()));
      used += rounded(a);
    }
  }

 private:
  std::vector<array> pieces_;
};

int most_blocks_of(const History& history, const AttendPlan& plan) {
  // More would only wait for each other.
  int64_t at_once =
      ceil_div(2 * gpu().processors * plan.heads, history.stack->sizes().heads);
  int64_t enough = attend_split(history.capacity, history.capacity).blocks;
  return static_cast<int>(std::min(at_once, enough));
}

// Numbers between the matrices of all experts of a token.
int64_t experts_inner(const Sizes& s) {
  return int64_t{s.experts.used} * s.experts.inner;
}

// What all steps of a history need, made with the first of them.
class Workspace {
 public:
  Workspace(const History& history, mx::Stream s);
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  void run(const array& x, array& out, int position, int number, mx::Stream s);

 private:
  void record(mx::Stream s);
  bool moved() const;
  void* fixed(const array& a);
  void layers(mx::Stream s);
  void product(
      const std::vector<Projection>& parts,
      const array& x,
      const std::optional<array>& c,
      const array& out,
      mx::Stream s);
  void norm(const array& x, void* weight, array& out, mx::Stream s);
  void attend(
      const Layer& layer, const array& keys, const array& values, mx::Stream s);
  void delta(
      const DeltaLayer& layer,
      const array& window,
      const array& states,
      mx::Stream s);
  void gate(array& x, array& y, int64_t rows, mx::Stream s);
  void mlp(const Layer& layer, mx::Stream s);
  void mixture(const Layer& layer, mx::Stream s);
  void of_experts(
      const std::vector<Projection>& parts,
      const array& x,
      const array& out,
      mx::Stream s);

  const History& history_; // which has this
  const Stack& stack_;
  const Sizes& sizes_;
  AttendPlan plan_;
  int most_blocks_;
  Memory memory_;
  array h_, normed_, in_, mixed_, middle_, gate_up_, gated_;
  array partial_, done_, params_;
  // Of mixtures of experts.
  array logits_, chosen_, shares_, pairs_, both_, inner_, made_, shared_;
  AttendParams told_{};
  DeltaStepParams delta_told_{};
  CUfunction norm_kernel_, attend_kernel_, gate_kernel_;
  RouteParams route_told_{};
  CUfunction delta_kernel_ = nullptr, route_kernel_ = nullptr,
             combine_kernel_ = nullptr;
  bool recorded_ = false;
  // The last is the one to launch; the others may still run.
  std::vector<CUgraphExec> graphs_;
  // What is not the workspace's own, with its address in the last graph.
  std::vector<std::pair<array, void*>> fixed_;
};

Workspace::Workspace(const History& history, mx::Stream s)
    : history_(history),
      stack_(*history.stack),
      sizes_(stack_.sizes()),
      plan_(attend_plan(sizes_, history.capacity)),
      most_blocks_(most_blocks_of(history, plan_)),
      h_(memory_.piece(sizes_.hidden, stack_.dtype())),
      normed_(memory_.piece(sizes_.hidden, stack_.dtype())),
      in_(memory_.piece(
          std::max(
              sizes_.queries_and_gates() + 2 * sizes_.keys(),
              sizes_.delta.channels() + sizes_.delta.values()),
          stack_.dtype())),
      mixed_(memory_.piece(
          std::max(sizes_.queries(), sizes_.delta.values()), stack_.dtype())),
      middle_(memory_.piece(sizes_.hidden, stack_.dtype())),
      gate_up_(memory_.piece(2 * sizes_.inner, stack_.dtype())),
      gated_(memory_.piece(sizes_.inner, stack_.dtype())),
      partial_(memory_.piece(
          int64_t{sizes_.heads} * most_blocks_ * (sizes_.head_dim + 2),
          mx::float32)),
      done_(memory_.piece(sizes_.heads + 1, mx::uint32)),
      params_(memory_.piece(sizeof(AttendParams), mx::uint8)),
      logits_(memory_.piece(sizes_.experts.count + 1, mx::float32)),
      chosen_(memory_.piece(sizes_.experts.used, mx::uint32)),
      shares_(memory_.piece(sizes_.experts.used + 1, mx::float32)),
      pairs_(memory_.piece(sizes_.experts.used, mx::uint32)),
      both_(memory_.piece(2 * experts_inner(sizes_), stack_.dtype())),
      inner_(memory_.piece(experts_inner(sizes_), stack_.dtype())),
      made_(memory_.piece(
          int64_t{sizes_.experts.used} * sizes_.hidden, stack_.dtype())),
      shared_(memory_.piece(sizes_.hidden, stack_.dtype())) {
  memory_.allocate(s);
  StepFunctions names =
      step_functions(sizes_, stack_.dtype(), history.capacity);
  norm_kernel_ = function(names.norm);
  gate_kernel_ = function(names.gate);
  attend_kernel_ = function(names.attend);
  told_.capacity = static_cast<uint32_t>(history.capacity);
  told_.group = static_cast<uint32_t>(sizes_.heads / sizes_.kv_heads);
  told_.pairs = static_cast<uint32_t>(sizes_.speeds.size());
  told_.traditional = sizes_.traditional;
  told_.gated = sizes_.gated;
  told_.eps = sizes_.eps;
  told_.scale = sizes_.scale * 1.44269504f; // log2(e)
  if (const DeltaSizes& d = sizes_.delta; d.heads > 0) {
    delta_kernel_ = function(names.delta);
    delta_told_ = {
        static_cast<uint32_t>(sizes_.hidden),
        static_cast<uint32_t>(d.key_heads),
        d.tiled,
        static_cast<uint32_t>(d.taps),
        sizes_.eps};
  }
  const ExpertSizes& e = sizes_.experts;
  if (e.count > 0) {
    route_kernel_ = function(names.route);
    combine_kernel_ = function(names.combine);
    route_told_ = {
        static_cast<uint32_t>(sizes_.hidden),
        static_cast<uint32_t>(e.count),
        0,
        static_cast<uint32_t>(e.used),
        e.normalised};
  }
  auto& encoder = mx::cu::get_command_encoder(s);
  encoder.commit(); // the memory's node writes to it
  check(
      cuMemsetD32Async(place_of(done_), 0, done_.size(), encoder.stream()),
      "clear memory");
  if (e.count > 0) {
    std::vector<uint32_t> pairs(e.used);
    std::iota(pairs.begin(), pairs.end(), 0);
    // Such a copy has left the host's memory when it returns.
    check(
        cuMemcpyHtoDAsync(
            place_of(pairs_), pairs.data(), pairs_.nbytes(), encoder.stream()),
        "number the experts of a token");
  }
}

Workspace::~Workspace() {
  mx::cu::device(mx::Device(mx::Device::gpu)).make_current();
  for (CUgraphExec graph : graphs_) {
    cuGraphExecDestroy(graph);
  }
}

void* Workspace::fixed(const array& a) {
  void* at = mx::gpu_ptr<void>(a);
  fixed_.push_back({a, at});
  return at;
}

// MLX moves an array that the host reads.
bool Workspace::moved() const {
  return std::any_of(fixed_.begin(), fixed_.end(), [](auto& entry) {
    return mx::gpu_ptr<void>(entry.first) != entry.second;
  });
}

void Workspace::record(mx::Stream s) {
  recorded_ = false;
  fixed_.clear();
  struct Guard {
    CUgraph graph = nullptr;
    ~Guard() {
      cuGraphDestroy(graph);
    }
  } made;
  check(cuGraphCreate(&made.graph, 0), "create a graph");
  {
    Recorded recorded(made.graph);
    layers(s);
  }
  CUgraphExec graph = nullptr;
  check(cuGraphInstantiate(&graph, made.graph, 0), "make a graph");
  graphs_.push_back(graph);
  recorded_ = true;
}

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
      {.grid = {blocks(route_told_.rows, 8), 1, 1},
       .block = {256, 1, 1},
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
      {.grid = {blocks(N, 8 * 64), 1, 1},
       .block = {64, 1, 1},
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
    array y({1, part.N()}, out.dtype(), nullptr, {});
    y.copy_shared_buffer(out, y.strides(), out.flags(), y.size(), first);
    first += part.N();
    launch(plan, format, p, in, y, used, experts, s);
  }
}

void Workspace::run(
    const array& x, array& out, int position, int number, mx::Stream s) {
  std::vector<float> turns = turns_at(sizes_, position);
  std::copy_n(turns.data(), told_.pairs, told_.cosines);
  std::copy_n(turns.data() + told_.pairs, told_.pairs, told_.sines);
  if (!recorded_ || moved()) {
    record(s);
  }
  AttendSplit split = attend_split(position, most_blocks_);
  told_.position = static_cast<uint32_t>(position);
  told_.turn = static_cast<uint32_t>(number % 2);
  told_.split = static_cast<uint32_t>(split.rows);
  told_.blocks = static_cast<uint32_t>(split.blocks);
  auto& encoder = mx::cu::get_command_encoder(s);
  encoder.commit(); // what MLX has enqueued so far comes first
  CUstream stream = encoder.stream();
  check(
      cuMemcpyHtoDAsync(place_of(params_), &told_, sizeof(told_), stream),
      "copy a token's numbers");
  check(
      cuMemcpyDtoDAsync(place_of(h_), place_of(x), x.nbytes(), stream),
      "copy a token");
  check(cuGraphLaunch(graphs_.back(), stream), "launch a graph");
  AtOnce at_once(stream);
  norm(h_, mx::gpu_ptr<void>(stack_.norm()), out, s);
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
    array y({1, part.N()}, out.dtype(), nullptr, {});
    y.copy_shared_buffer(out, y.strides(), out.flags(), y.size(), first);
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
  auto threads = static_cast<unsigned>(8 * sizes_.delta.head_dim);
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

} // namespace

void step(
    const array& x,
    array& out,
    const std::shared_ptr<History>& history,
    int position,
    int number,
    mx::Stream s) {
  out.set_data(mx::allocator::malloc(out.nbytes()));
  auto* workspace = static_cast<Workspace*>(history->workspace.get());
  if (!workspace) {
    auto made = std::make_shared<Workspace>(*history, s);
    workspace = made.get();
    history->workspace = std::move(made);
  }
  workspace->run(in_rows(x, s), out, position, number, s);
  mx::cu::get_command_encoder(s).add_completed_handler([history] {});
}

} // namespace mlx_gguf::cuda
