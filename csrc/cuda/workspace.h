// What steps of a history share on the device: memory, kernels and the graph
// that every token launches.
#pragma once

#include <utility>
#include <vector>

#include "cuda/attend.h"
#include "cuda/launch.h"
#include "gpu/batch.h"
#include "mlx/backend/cuda/utils.h"
#include "step.h"

namespace mlx_gguf::cuda {

inline CUdeviceptr place_of(const array& a) {
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

} // namespace mlx_gguf::cuda
