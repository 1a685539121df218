// A token's way through all layers of a model of llama's family, or of one
// whose layers are gated delta rules and attention in turn (Qwen3.5), as one
// node of the graph: where a launch takes microseconds, the hundreds of nodes
// that it is otherwise cost more than their kernels.
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
  array w; // uint8 [N, row_bytes], or [experts, N, row_bytes]
  const Format* format;
  std::optional<array> bias; // [N]

  int N() const {
    return w.shape(-2);
  }
  int K() const {
    return static_cast<int>(
        w.shape(-1) / format->block_bytes * int64_t(format->block_size));
  }
};

// Of a layer that is a gated delta rule (delta.h). Its inputs q, k and v are
// convolved over the last tokens first, and its output is normed and gated.
struct DeltaLayer {
  array gates;   // f32 [2 heads, hidden]: what makes decays, then betas
  array taps;    // [channels, taps] of the convolution, the oldest first
  array dt_bias; // f32 [heads], as the next
  array a_log;
  array norm; // [head_dim]
};

// Of a layer whose MLP is a mixture of experts.
struct ExpertLayer {
  array
      router; // f32 [experts, hidden], and the shared one's gate as a last row
  std::vector<Projection> gate_up; // one output after the other
  Projection down;
};

struct Layer {
  array input_norm;
  // One output after the other: q, k and v, with a head's gate after its q
  // where there are gates; of a delta rule q, k, v and z.
  std::vector<Projection> in;
  std::optional<array> q_norm;
  std::optional<array> k_norm;
  std::optional<DeltaLayer> delta;
  Projection output;
  array mlp_norm;
  // Of the MLP, or of the expert that all tokens share, where there is one.
  std::vector<Projection> gate_up;
  std::optional<Projection> down;
  std::optional<ExpertLayer> experts;
};

// Of all gated delta rules of a model.
struct DeltaSizes {
  int heads = 0; // of values; 0: the model has none
  int key_heads = 0;
  int head_dim = 0; // of keys and values
  int taps = 0;
  bool tiled = false; // head h has key head h % key_heads, not h / repeats

  int channels() const {
    return (2 * key_heads + heads) * head_dim;
  }
  int values() const {
    return heads * head_dim;
  }
};

// Of all mixtures of experts of a model.
struct ExpertSizes {
  int count = 0; // 0: the model has none
  int used = 0;  // by a token, those of the largest probability
  int inner = 0;
  bool normalised = false; // the used ones' probabilities sum to 1
};

// What all layers have in common.
struct Sizes {
  int hidden;
  int inner; // of the MLP or the shared expert; 0: there is none
  int heads;
  int kv_heads;
  int head_dim;
  bool gated; // attention's output, by numbers beside q
  float eps;
  float scale;                // of attention scores
  bool traditional;           // rotated pairs lie side by side
  float gain;                 // of rotated numbers
  std::vector<double> speeds; // of each rotated pair, radians a position
  DeltaSizes delta;
  ExpertSizes experts;

  int queries() const {
    return heads * head_dim;
  }
  int queries_and_gates() const {
    return gated ? 2 * queries() : queries();
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

// What layers keep of the tokens so far, two arrays each, which steps write to
// in place: nobody else has them before read_history(), and no step may follow
// it. Keys and values [1, kv_heads, capacity, head_dim]; of a delta rule the
// last inputs of its convolution [2, taps - 1, channels], of which step i reads
// number i % 2 and writes the other, and its state.
struct History : std::enable_shared_from_this<History> {
  std::shared_ptr<const Stack> stack;
  int capacity;
  int steps = 0;
  std::vector<array> wanted; // what the first step has to begin with
  std::vector<array> first;  // from then on
  std::vector<array> second;

  int64_t nbytes(int layer) const;

  std::shared_ptr<void> workspace; // a backend's own
};

// A copy of a cache's arrays, two for each layer; of keys and values of the
// first `length` rows, with room for more. Nothing if they are not what the
// stack's layers make.
std::shared_ptr<History> begin_history(
    std::shared_ptr<const Stack> stack,
    const std::vector<array>& first,
    const std::vector<array>& second,
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

// What a layer keeps, as its cache has it, after the step that gave `last`, or
// before the first, in the history's own memory.
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
    int number, // of the history's steps
    mx::Stream s);
namespace cpu {
StepFunction step;
}
namespace cuda {
StepFunction step; // in the shared object: cuda/backend.h
}

} // namespace mlx_gguf
