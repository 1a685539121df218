// RMS normalisation, rotary positions, attention, SiLU, GELU and the log of a
// sum of exponentials on the CPU, each as one graph node. MLX has no kernels of
// its own for them there and builds a dozen small operations instead, or goes
// number by number on one thread. Derivatives and vmap go through those.
#pragma once

#include <optional>
#include <variant>
#include <vector>

#include "derivatives.h"
#include "mlx/array.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"

namespace mlx_gguf::cpu {

namespace mx = mlx::core;
using mlx::core::array; // names that MLX's macros use
using mlx::core::Shape;

// The stream of a node of ours, if it is to be one: on the CPU, and not while
// MLX's own primitives are asked for.
std::optional<mx::Stream> our_stream(mx::StreamOrDevice s);

// As the functions of mlx/fast.h. Nothing where the stream is not on the CPU,
// or the arguments are not ones that our kernels take: then MLX's own function
// is to be called, which also says what is wrong with them.
std::optional<array> rms_norm(
    const array& x,
    const std::optional<array>& weight,
    float eps,
    mx::StreamOrDevice s);
std::optional<array> rope(
    const array& x,
    int dims,
    bool traditional,
    std::optional<float> base,
    float scale,
    const std::variant<int, array>& offset,
    const std::optional<array>& freqs,
    mx::StreamOrDevice s);
// nn.silu and nn.gelu_approx.
std::optional<array> gate(const array& x, bool gelu, mx::StreamOrDevice s);
// Over the last axis, which stays with size 1.
std::optional<array> logsumexp(const array& x, mx::StreamOrDevice s);
std::optional<array> attention(
    const array& q,
    const array& k,
    const array& v,
    float scale,
    bool causal,
    const std::optional<array>& mask,
    mx::StreamOrDevice s);

// A node that MLX can also spell in its own operations.
class Fast : public mx::UnaryPrimitive {
 public:
  using UnaryPrimitive::UnaryPrimitive;
  void eval_gpu(const std::vector<array>& inputs, array& out) override;
  DEFINE_VMAP()
  DEFINE_GRADS()

 protected:
  virtual array spelled_out(const std::vector<array>& inputs) = 0;

 private:
  Derivatives derivatives(
      const std::vector<array>& primals, const std::vector<int>& argnums);
};

// inputs: x [..., N] and optionally the weight [N]; any of them in any of our
// dtypes.
class RmsNorm : public Fast {
 public:
  RmsNorm(mx::Stream stream, float eps) : Fast(stream), eps_(eps) {}

  void eval_cpu(const std::vector<array>& inputs, array& out) override;
  DEFINE_NAME(GGUFRmsNorm)
  DEFINE_INPUT_OUTPUT_SHAPE()
  bool is_equivalent(const mx::Primitive& other) const override;

 protected:
  array spelled_out(const std::vector<array>& inputs) override;

 private:
  float eps_;
};

// x times the logistic function of x, or of what makes it the tanh form of GELU
// (arXiv:1606.08415).
class Gate : public Fast {
 public:
  Gate(mx::Stream stream, bool gelu) : Fast(stream), gelu_(gelu) {}

  void eval_cpu(const std::vector<array>& inputs, array& out) override;
  DEFINE_NAME(GGUFGate)
  DEFINE_INPUT_OUTPUT_SHAPE()
  bool is_equivalent(const mx::Primitive& other) const override;

 protected:
  array spelled_out(const std::vector<array>& inputs) override;

 private:
  bool gelu_;
};

// input: x [..., N]; output [..., 1].
class LogSumExp : public Fast {
 public:
  using Fast::Fast;

  void eval_cpu(const std::vector<array>& inputs, array& out) override;
  DEFINE_NAME(GGUFLogSumExp)
  bool is_equivalent(const mx::Primitive&) const override {
    return true;
  }
  std::vector<mx::Shape> output_shapes(
      const std::vector<array>& inputs) override;

 protected:
  array spelled_out(const std::vector<array>& inputs) override;
};

struct RopeState {
  int dims;
  bool traditional;
  std::optional<float> base;
  float scale;
  std::optional<int> offset; // else the second input, one or one per batch
  bool operator==(const RopeState&) const = default;
};

// inputs: x [B, ..., T, D], then the offset and the frequencies where they are
// arrays.
class Rope : public Fast {
 public:
  Rope(mx::Stream stream, RopeState state) : Fast(stream), state_(state) {}

  void eval_cpu(const std::vector<array>& inputs, array& out) override;
  DEFINE_NAME(GGUFRope)
  DEFINE_INPUT_OUTPUT_SHAPE()
  bool is_equivalent(const mx::Primitive& other) const override;

 protected:
  array spelled_out(const std::vector<array>& inputs) override;

 private:
  RopeState state_;
};

// inputs: q [B, H, L, D], k [B, Hk, S, D], v [B, Hk, S, Dv] and optionally a
// mask that broadcasts to [B, H, L, S].
class Attention : public Fast {
 public:
  Attention(mx::Stream stream, float scale, bool causal)
      : Fast(stream), scale_(scale), causal_(causal) {}

  void eval_cpu(const std::vector<array>& inputs, array& out) override;
  DEFINE_NAME(GGUFAttention)
  bool is_equivalent(const mx::Primitive& other) const override;
  std::vector<mx::Shape> output_shapes(
      const std::vector<array>& inputs) override;

 protected:
  array spelled_out(const std::vector<array>& inputs) override;

 private:
  float scale_;
  bool causal_;
};

} // namespace mlx_gguf::cpu
