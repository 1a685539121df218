#include "primitives.h"

#include <sstream>

#include "cpu/eval.h"
#include "cuda/backend.h"
#include "mlx/ops.h"
#include "transforms.h"
#ifdef MLX_GGUF_METAL
#include "metal/eval.h"
#endif

namespace mlx_gguf {

namespace {

using Arrays = std::vector<array>;

// The backends plug in here, one call each, as they exist.
[[noreturn]] void no_gpu_kernels(const char* op, const mx::Stream& s) {
  std::ostringstream msg;
  msg << '[' << op << "] Expected a stream on a device with kernels (cpu). "
      << "Received " << s.device << "; pass stream=mx.cpu.";
  throw std::runtime_error(msg.str());
}

[[noreturn]] void no_gradient(const char* op) {
  throw std::invalid_argument(
      std::string("[") + op +
      "] Expected a derivative with respect to activations. Received a request "
      "for one with respect to packed weights or indices, which have none.");
}

array matmul_node(Arrays inputs, MatmulState state, const mx::Stream& s) {
  mx::Shape shape = matmul_shape(
      inputs[0].shape(), inputs[1].shape(), *state.format, state.transpose);
  mx::Dtype dtype = inputs[0].dtype();
  for (array& a : inputs) {
    a = mx::contiguous(a, false, s);
  }
  return array(
      std::move(shape),
      dtype,
      std::make_shared<QuantizedMatmul>(s, state),
      std::move(inputs));
}

array gather_node(
    Arrays inputs,
    const Format* format,
    bool transpose,
    bool sorted,
    const mx::Stream& s) {
  mx::Shape shape = gather_shape(
      inputs[0].shape(),
      inputs[1].shape(),
      inputs[2].shape(),
      *format,
      transpose);
  mx::Dtype dtype = inputs[0].dtype();
  for (array& a : inputs) {
    a = mx::contiguous(a, false, s);
  }
  return array(
      std::move(shape),
      dtype,
      std::make_shared<GatherQmm>(s, format, transpose, sorted),
      std::move(inputs));
}

int out_features(const mx::Shape& w, const Format& format, bool transpose) {
  return transpose ? w[w.size() - 2]
                   : w.back() / format.block_bytes * format.block_size;
}

} // namespace

// Shapes

mx::Shape matmul_shape(
    const mx::Shape& x,
    const mx::Shape& w,
    const Format& format,
    bool transpose) {
  mx::Shape out = x;
  if (w.size() > 2) {
    mx::Shape x_batch(x.begin(), x.end() - 2);
    mx::Shape w_batch(w.begin(), w.end() - 2);
    out = mx::broadcast_shapes(x_batch, w_batch);
    out.push_back(x[x.size() - 2]);
    out.push_back(0);
  }
  out.back() = out_features(w, format, transpose);
  return out;
}

mx::Shape gather_shape(
    const mx::Shape& x,
    const mx::Shape& w,
    const mx::Shape& indices,
    const Format& format,
    bool transpose) {
  mx::Shape out = indices;
  out.push_back(x[x.size() - 2]);
  out.push_back(out_features(w, format, transpose));
  return out;
}

mx::Shape dequantize_shape(const mx::Shape& w, const Format& format) {
  mx::Shape out = w;
  out.back() = w.back() / format.block_bytes * format.block_size;
  return out;
}

// QuantizedMatmul

void QuantizedMatmul::eval_cpu(const Arrays& inputs, array& out) {
  cpu::quantized_matmul(inputs, out, state_, stream());
}

void QuantizedMatmul::eval_gpu(const Arrays& inputs, array& out) {
#ifdef MLX_GGUF_METAL
  if (metal::is_available()) {
    return metal::quantized_matmul(inputs, out, state_, stream());
  }
#endif
  if (auto* cuda = cuda::loaded()) {
    return cuda->quantized_matmul(inputs, out, state_, stream());
  }
  no_gpu_kernels("quantized_matmul", stream());
}

bool QuantizedMatmul::is_equivalent(const mx::Primitive& other) const {
  return state_ == static_cast<const QuantizedMatmul&>(other).state_;
}

std::vector<mx::Shape> QuantizedMatmul::output_shapes(const Arrays& inputs) {
  return {matmul_shape(
      inputs[0].shape(), inputs[1].shape(), *state_.format, state_.transpose)};
}

// The product is linear in x and in c.
Arrays QuantizedMatmul::jvp(
    const Arrays& primals,
    const Arrays& tangents,
    const std::vector<int>& argnums) {
  std::optional<array> sum;
  auto add = [&](const array& term) {
    sum = sum ? mx::add(*sum, term, stream()) : term;
  };
  for (size_t i = 0; i < argnums.size(); ++i) {
    if (argnums[i] == 1) {
      no_gradient("quantized_matmul::jvp");
    }
    if (argnums[i] == 0) {
      add(matmul_node({tangents[i], primals[1]}, state_, stream()));
    } else {
      mx::Shape shape = output_shapes(primals)[0];
      add(mx::broadcast_to(scaled(tangents[i], state_.beta, stream()), shape));
    }
  }
  return {*sum};
}

Arrays QuantizedMatmul::vjp(
    const Arrays& primals,
    const Arrays& cotangents,
    const std::vector<int>& argnums,
    const Arrays&) {
  Arrays grads;
  for (int i : argnums) {
    if (i == 1) {
      no_gradient("quantized_matmul::vjp");
    }
    array grad = cotangents[0];
    if (i == 0) {
      MatmulState back = state_;
      back.transpose = !state_.transpose;
      grad = matmul_node({grad, primals[1]}, back, stream());
    } else {
      grad = scaled(grad, state_.beta, stream());
    }
    grads.push_back(sum_to_shape(grad, primals[i].shape(), stream()));
  }
  return grads;
}

std::pair<Arrays, std::vector<int>> QuantizedMatmul::vmap(
    const Arrays& inputs, const std::vector<int>& axes) {
  Folded folded = fold_product(inputs, axes, stream());
  array out = matmul_node(folded.inputs, state_, stream());
  folded.shape.push_back(out.shape(-1));
  return {{mx::reshape(out, folded.shape, stream())}, {0}};
}

// GatherQmm

void GatherQmm::eval_cpu(const Arrays& inputs, array& out) {
  cpu::gather_qmm(inputs, out, *format_, transpose_, stream());
}

void GatherQmm::eval_gpu(const Arrays& inputs, array& out) {
#ifdef MLX_GGUF_METAL
  if (metal::is_available()) {
    return metal::gather_qmm(
        inputs, out, *format_, transpose_, sorted_, stream());
  }
#endif
  if (auto* cuda = cuda::loaded()) {
    return cuda->gather_qmm(
        inputs, out, *format_, transpose_, sorted_, stream());
  }
  no_gpu_kernels("gather_qmm", stream());
}

bool GatherQmm::is_equivalent(const mx::Primitive& other) const {
  auto& o = static_cast<const GatherQmm&>(other);
  return format_ == o.format_ && transpose_ == o.transpose_ &&
         sorted_ == o.sorted_;
}

std::vector<mx::Shape> GatherQmm::output_shapes(const Arrays& inputs) {
  return {gather_shape(
      inputs[0].shape(),
      inputs[1].shape(),
      inputs[2].shape(),
      *format_,
      transpose_)};
}

Arrays GatherQmm::jvp(
    const Arrays& primals,
    const Arrays& tangents,
    const std::vector<int>& argnums) {
  if (argnums.size() != 1 || argnums[0] != 0) {
    no_gradient("gather_qmm::jvp");
  }
  return {gather_node(
      {tangents[0], primals[1], primals[2], primals[3]},
      format_,
      transpose_,
      sorted_,
      stream())};
}

// Every pair sends its cotangent back through its expert; pairs that read the
// same x add up.
Arrays GatherQmm::vjp(
    const Arrays& primals,
    const Arrays& cotangents,
    const std::vector<int>& argnums,
    const Arrays&) {
  if (argnums.size() != 1 || argnums[0] != 0) {
    no_gradient("gather_qmm::vjp");
  }
  const array& x = primals[0];
  const array& rhs = primals[3];
  int pairs = static_cast<int>(rhs.size());
  if (pairs == 0) {
    return {mx::zeros_like(x, stream())};
  }
  array each = mx::reshape(
      mx::arange(0, pairs, mx::uint32, stream()), rhs.shape(), stream());
  array grad = gather_node(
      {cotangents[0], primals[1], each, rhs},
      format_,
      !transpose_,
      sorted_,
      stream());
  int M = x.shape(-2);
  int K = x.shape(-1);
  array zeros = mx::zeros({batch_size(x), M, K}, x.dtype(), stream());
  array sum = mx::scatter_add(
      zeros,
      mx::reshape(primals[2], {pairs}, stream()),
      mx::reshape(grad, {pairs, 1, M, K}, stream()),
      0,
      stream());
  return {mx::reshape(sum, x.shape(), stream())};
}

std::pair<Arrays, std::vector<int>> GatherQmm::vmap(
    const Arrays& inputs, const std::vector<int>& axes) {
  Arrays folded = fold_gather(inputs, axes, stream());
  return {{gather_node(folded, format_, transpose_, false, stream())}, {0}};
}

// Dequantize

void Dequantize::eval_cpu(const Arrays& inputs, array& out) {
  cpu::dequantize(inputs[0], out, *format_, stream());
}

void Dequantize::eval_gpu(const Arrays& inputs, array& out) {
#ifdef MLX_GGUF_METAL
  if (metal::is_available()) {
    return metal::dequantize(inputs[0], out, *format_, stream());
  }
#endif
  if (auto* cuda = cuda::loaded()) {
    return cuda->dequantize(inputs[0], out, *format_, stream());
  }
  no_gpu_kernels("dequantize", stream());
}

bool Dequantize::is_equivalent(const mx::Primitive& other) const {
  auto& o = static_cast<const Dequantize&>(other);
  return format_ == o.format_ && dtype_ == o.dtype_;
}

std::vector<mx::Shape> Dequantize::output_shapes(const Arrays& inputs) {
  return {dequantize_shape(inputs[0].shape(), *format_)};
}

Arrays Dequantize::jvp(const Arrays&, const Arrays&, const std::vector<int>&) {
  no_gradient("dequantize::jvp");
}

Arrays Dequantize::vjp(
    const Arrays&, const Arrays&, const std::vector<int>&, const Arrays&) {
  no_gradient("dequantize::vjp");
}

std::pair<Arrays, std::vector<int>> Dequantize::vmap(
    const Arrays& inputs, const std::vector<int>& axes) {
  array w = mx::contiguous(
      mx::moveaxis(inputs[0], axes[0], 0, stream()), false, stream());
  mx::Shape shape = dequantize_shape(w.shape(), *format_);
  return {
      {array(
          std::move(shape),
          dtype_,
          std::make_shared<Dequantize>(stream(), format_, dtype_),
          {w})},
      {0}};
}

} // namespace mlx_gguf
