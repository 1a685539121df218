// One token through all layers, whose kernels are recorded once as a graph that
// every token launches. What differs between tokens is in memory.
#include <numeric>

#include "cuda/names.h"
#include "cuda/workspace.h"
#include "mlx/allocator.h"

namespace mlx_gguf::cuda {

namespace {

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

} // namespace

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
