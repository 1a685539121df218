#include "parts.h"

#include <algorithm>
#include <sstream>

#include "export.h"
#include "mlx/backend/common/utils.h"
#include "mlx/ops.h"
#include "ops.h"
#include "primitives.h"

namespace mlx_gguf {

namespace {

using Arrays = std::vector<array>;

// The product `whole`, and views of it as outputs.
class QuantizedMatmulParts : public mx::Primitive {
 public:
  QuantizedMatmulParts(
      std::shared_ptr<mx::Primitive> whole, std::vector<int> ends)
      : Primitive(whole->stream()),
        whole_(std::move(whole)),
        ends_(std::move(ends)) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    Arrays y{product_of(outputs)};
    whole_->eval_cpu(inputs, y);
    hand_out(y[0], outputs);
  }

  void eval_gpu(const Arrays& inputs, Arrays& outputs) override {
    Arrays y{product_of(outputs)};
    whole_->eval_gpu(inputs, y);
    hand_out(y[0], outputs);
  }

  std::pair<Arrays, std::vector<int>> vmap(
      const Arrays& inputs, const std::vector<int>& axes) override {
    array y = whole_->vmap(inputs, axes).first[0];
    Arrays parts = split(y);
    return {parts, std::vector<int>(parts.size(), 0)};
  }

  Arrays jvp(
      const Arrays& primals,
      const Arrays& tangents,
      const std::vector<int>& argnums) override {
    return split(whole_->jvp(primals, tangents, argnums)[0]);
  }

  Arrays vjp(
      const Arrays& primals,
      const Arrays& cotangents,
      const std::vector<int>& argnums,
      const Arrays& outputs) override {
    array whole = mx::concatenate(cotangents, -1, stream());
    return whole_->vjp(primals, {whole}, argnums, outputs);
  }

  const char* name() const override {
    return "GGUFQuantizedMatmulParts";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    auto& o = static_cast<const QuantizedMatmulParts&>(other);
    return ends_ == o.ends_ && whole_->is_equivalent(*o.whole_);
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return cut(whole_->output_shapes(inputs)[0], ends_);
  }

  static std::vector<mx::Shape> cut(
      const mx::Shape& whole, const std::vector<int>& ends) {
    std::vector<mx::Shape> out;
    int first = 0;
    for (size_t i = 0; i <= ends.size(); ++i) {
      int last = i < ends.size() ? ends[i] : whole.back();
      out.push_back(whole);
      out.back().back() = last - first;
      first = last;
    }
    return out;
  }

 private:
  Arrays split(const array& y) {
    return mx::split(y, mx::Shape(ends_.begin(), ends_.end()), -1, stream());
  }

  static array product_of(const Arrays& outputs) {
    mx::Shape shape = outputs[0].shape();
    shape.back() = 0;
    for (const array& part : outputs) {
      shape.back() += part.shape(-1);
    }
    return array(std::move(shape), outputs[0].dtype(), nullptr, {});
  }

  static void hand_out(const array& y, Arrays& outputs) {
    int64_t first = 0;
    for (array& part : outputs) {
      auto [_, row, col] = mx::check_contiguity(part.shape(), y.strides());
      part.copy_shared_buffer(
          y,
          y.strides(),
          {.contiguous = row || col,
           .row_contiguous = row,
           .col_contiguous = col},
          span(part.shape(), y.strides()),
          first);
      first += part.shape(-1);
    }
  }

  // From its first number to its last: operations that keep an input's strides
  // ask for that much memory.
  static size_t span(const mx::Shape& shape, const mx::Strides& strides) {
    int64_t last = 0;
    for (size_t i = 0; i < shape.size(); ++i) {
      if (shape[i] == 0) {
        return 0;
      }
      last += (shape[i] - 1) * strides[i];
    }
    return static_cast<size_t>(last + 1);
  }

  std::shared_ptr<mx::Primitive> whole_; // a QuantizedMatmul
  std::vector<int> ends_;
};

} // namespace

std::vector<array> quantized_matmul_parts(
    const array& x,
    const array& w,
    const std::string& qtype,
    const std::vector<int>& ends,
    const std::optional<array>& bias,
    mx::StreamOrDevice s) {
  array y = bias ? quantized_addmm(*bias, x, w, qtype, 1, 1, true, s)
                 : quantized_matmul(x, w, qtype, true, s);
  if (!std::is_sorted(ends.begin(), ends.end()) ||
      (!ends.empty() && (ends[0] < 0 || ends.back() > y.shape(-1)))) {
    std::ostringstream msg;
    msg << "[quantized_matmul_parts] Expected ends that ascend from 0 to "
        << y.shape(-1) << ". Received";
    for (int end : ends) {
      msg << ' ' << end;
    }
    throw std::invalid_argument(msg.str() + ".");
  }
  if (native_ops()) {
    return mx::split(y, mx::Shape(ends.begin(), ends.end()), -1, s);
  }
  std::vector<mx::Shape> shapes = QuantizedMatmulParts::cut(y.shape(), ends);
  std::vector<mx::Dtype> dtypes(shapes.size(), y.dtype());
  return array::make_arrays(
      std::move(shapes),
      dtypes,
      std::make_shared<QuantizedMatmulParts>(y.primitive_ptr(), ends),
      y.inputs());
}

} // namespace mlx_gguf
