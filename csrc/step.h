// A token's way through all layers of a model of llama's family, as one node
// of the graph: where a launch takes microseconds, the hundreds of nodes that
// it is otherwise cost more than their kernels.
#pragma once

#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "formats.h"
#include "mlx/array.h"
#include "mlx/utils.h"

namespace mlx_gguf {

namespace mx = mlx::core;
using mlx::core::array;

// x W^T + bias.
struct Projection {
  array w; // uint8 [N, row_bytes]
  const Format* format;
  std::optional<array> bias; // [N]

  int N() const {
    return w.shape(0);
  }
  int K() const {
    return static_cast<int>(
        w.shape(1) / format->block_bytes * int64_t(format->block_size));
  }
};

struct Layer {
  array input_norm;
  std::vector<Projection> qkv; // one output after the other
  std::optional<array> q_norm;
  std::optional<array> k_norm;
  Projection output;
  array mlp_norm;
  std::vector<Projection> gate_up;
  Projection down;
};

// What all layers have in common.
struct Sizes {
  int hidden;
  int inner; // of the MLP
  int heads;
  int kv_heads;
  int head_dim;
  float eps;
  float scale;                // of attention scores
  bool traditional;           // rotated pairs lie side by side
  float gain;                 // of rotated numbers
  std::vector<double> speeds; // of each rotated pair, radians a position

  int queries() const {
    return heads * head_dim;
  }
  int keys() const {
    return kv_heads * head_dim;
  }
};

// A model's layers and its last norm: all norms and biases in one dtype, which
// is that of x. As of a history, pointers to it are shared without Python's
// help: a backend's thread may be the last to let go of them.
class Stack : public std::enable_shared_from_this<Stack> {
 public:
  Stack(Sizes sizes, array norm);

  // std::invalid_argument where the shapes do not fit.
  void add(Layer layer);

  const Sizes& sizes() const {
    return sizes_;
  }
  const std::vector<Layer>& layers() const {
    return layers_;
  }
  const array& norm() const {
    return norm_;
  }
  mx::Dtype dtype() const {
    return norm_.dtype();
  }

 private:
  Sizes sizes_;
  array norm_;
  std::vector<Layer> layers_;
};

// Keys and values of the tokens so far, [1, kv_heads, capacity, head_dim] for
// every layer, which steps write to in place: nobody else has them before
// read_history(), and no step may follow it.
struct History : std::enable_shared_from_this<History> {
  std::shared_ptr<const Stack> stack;
  int capacity;
  std::vector<array> wanted; // what the first step has to begin with
  std::vector<array> keys;   // from then on
  std::vector<array> values;
  std::shared_ptr<void> workspace; // a backend's own
};

// A copy of the first `length` rows of a cache's arrays with room for more.
// Nothing if they are not what the stack's layers make.
std::shared_ptr<History> begin_history(
    std::shared_ptr<const Stack> stack,
    const std::vector<array>& keys,
    const std::vector<array>& values,
    int length,
    mx::StreamOrDevice s = {});

// All layers and the last norm for x [1, 1, hidden] at a position, which is
// below the history's capacity. `last` is what the step before gave: steps run
// in their order. Nothing where the layers are to be called one by one.
std::optional<array> step(
    const std::shared_ptr<History>& history,
    const array& x,
    int position,
    const std::optional<array>& last,
    mx::StreamOrDevice s = {});

// Keys and values of a layer after the step that gave `last`, or before the
// first, in the history's own memory.
std::pair<array, array> read_history(
    const std::shared_ptr<History>& history,
    int layer,
    const std::optional<array>& last,
    mx::StreamOrDevice s = {});

// Turns of each pair at a position: cosines, then as many sines.
inline std::vector<float> turns_at(const Sizes& sizes, int position) {
  size_t pairs = sizes.speeds.size();
  std::vector<float> out(2 * pairs);
  for (size_t i = 0; i < pairs; ++i) {
    double angle = position * sizes.speeds[i];
    out[i] = static_cast<float>(sizes.gain * std::cos(angle));
    out[pairs + i] = static_cast<float>(sizes.gain * std::sin(angle));
  }
  return out;
}

// Each backend's evaluation.
using StepFunction = void(
    const array& x,
    array& out,
    const std::shared_ptr<History>& history,
    int position,
    mx::Stream s);
namespace cpu {
StepFunction step;
}
namespace cuda {
StepFunction step; // in the shared object: cuda/backend.h
}

} // namespace mlx_gguf
