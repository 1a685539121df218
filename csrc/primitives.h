// The graph nodes. Each evaluates on its stream's device and knows its
// derivatives and its vectorised form; none reads strides or data before eval.
#pragma once

#include "formats.h"
#include "mlx/primitives.h"

namespace mlx_gguf {

namespace mx = mlx::core;
using mlx::core::array; // the name MLX's macros below use

// alpha * x @ W.T + beta * c.
struct MatmulState {
  const Format* format;
  bool transpose;
  float alpha = 1.0f;
  float beta = 1.0f;
  bool operator==(const MatmulState&) const = default;
};

// Names carry a prefix: MLX's export finds primitives by name and would take
// ours for its own class of the same name.

// inputs: x [..., M, K], w [..., N, row_bytes] and optionally c, which
// broadcasts to the output.
class QuantizedMatmul : public mx::UnaryPrimitive {
 public:
  QuantizedMatmul(mx::Stream stream, MatmulState state)
      : UnaryPrimitive(stream), state_(state) {}

  void eval_cpu(const std::vector<array>& inputs, array& out) override;
  void eval_gpu(const std::vector<array>& inputs, array& out) override;
  DEFINE_VMAP()
  DEFINE_GRADS()
  DEFINE_NAME(GGUFQuantizedMatmul)
  bool is_equivalent(const mx::Primitive& other) const override;
  std::vector<mx::Shape> output_shapes(
      const std::vector<array>& inputs) override;

 private:
  MatmulState state_;
};

// inputs: x [..., M, K], w [E, N, row_bytes], lhs and rhs indices of one shape.
class GatherQmm : public mx::UnaryPrimitive {
 public:
  GatherQmm(
      mx::Stream stream, const Format* format, bool transpose, bool sorted)
      : UnaryPrimitive(stream),
        format_(format),
        transpose_(transpose),
        sorted_(sorted) {}

  void eval_cpu(const std::vector<array>& inputs, array& out) override;
  void eval_gpu(const std::vector<array>& inputs, array& out) override;
  DEFINE_VMAP()
  DEFINE_GRADS()
  DEFINE_NAME(GGUFGatherQmm)
  bool is_equivalent(const mx::Primitive& other) const override;
  std::vector<mx::Shape> output_shapes(
      const std::vector<array>& inputs) override;

 private:
  const Format* format_;
  bool transpose_;
  bool sorted_; // a promise that rhs indices ascend, so experts come in runs
};

// input: w [..., row_bytes]; output [..., K] in dtype.
class Dequantize : public mx::UnaryPrimitive {
 public:
  Dequantize(mx::Stream stream, const Format* format, mx::Dtype dtype)
      : UnaryPrimitive(stream), format_(format), dtype_(dtype) {}

  void eval_cpu(const std::vector<array>& inputs, array& out) override;
  void eval_gpu(const std::vector<array>& inputs, array& out) override;
  DEFINE_VMAP()
  DEFINE_GRADS()
  DEFINE_NAME(GGUFDequantize)
  bool is_equivalent(const mx::Primitive& other) const override;
  std::vector<mx::Shape> output_shapes(
      const std::vector<array>& inputs) override;

 private:
  const Format* format_;
  mx::Dtype dtype_;
};

// Shapes of the products, shared by ops (before a node exists) and nodes.
mx::Shape matmul_shape(
    const mx::Shape& x,
    const mx::Shape& w,
    const Format& format,
    bool transpose);
mx::Shape gather_shape(
    const mx::Shape& x,
    const mx::Shape& w,
    const mx::Shape& indices,
    const Format& format,
    bool transpose);
mx::Shape dequantize_shape(const mx::Shape& w, const Format& format);

} // namespace mlx_gguf
