#include "ops.h"

#include <algorithm>
#include <sstream>

#include "cuda/backend.h"
#include "export.h"
#include "formats.h"
#include "mlx/ops.h"
#include "primitives.h"

namespace mlx_gguf {

namespace {

template <typename... Args>
[[noreturn]] void invalid(const char* op, const Args&... args) {
  std::ostringstream msg;
  msg << '[' << op << "] ";
  (msg << ... << args);
  throw std::invalid_argument(msg.str());
}

// An input in row order. MLX's own operations take any strides, and a graph
// that is exported cannot hold a Contiguous node.
array in_rows(const array& a, mx::StreamOrDevice s) {
  return native_ops() ? a : mx::contiguous(a, false, s);
}

// An input that may be small: the CPU and CUDA put it in row order themselves,
// which costs less than a node.
array small_in_rows(const array& a, mx::StreamOrDevice s) {
  bool themselves =
      cuda::loaded() || mx::to_stream(s).device == mx::Device::cpu;
  return themselves ? a : in_rows(a, s);
}

// An array that is already evaluated has its final layout, so the graph node
// that would copy it can be left out: it costs more than a microsecond for
// every weight and token, and on a device it may copy a tensor out of its
// mapping.
array contiguous(const array& a, mx::StreamOrDevice s) {
  bool final_layout = !a.has_primitive() && !a.is_tracer() &&
                      a.status() == array::Status::available;
  return final_layout && a.flags().row_contiguous ? a : in_rows(a, s);
}

// Packed bytes in row order. A tensor of plain numbers may come in its own
// dtype.
array as_rows(
    const char* op,
    const array& w,
    const Format& format,
    mx::StreamOrDevice s) {
  bool plain = format.plain && w.dtype() == *format.plain && w.ndim() > 0;
  if (!plain && w.dtype() != mx::uint8) {
    invalid(
        op,
        "Expected weights as packed uint8 of type ",
        format.name,
        ". Received dtype ",
        w.dtype(),
        ".");
  }
  array rows = contiguous(w, s);
  return plain ? mx::view(rows, mx::uint8, s) : rows;
}

bool broadcasts_to(const mx::Shape& from, const mx::Shape& to) {
  if (from.size() > to.size()) {
    return false;
  }
  for (size_t i = 1; i <= from.size(); ++i) {
    int n = from[from.size() - i];
    if (n != 1 && n != to[to.size() - i]) {
      return false;
    }
  }
  return true;
}

// Whether all axes but the last `trailing` broadcast against each other.
bool batches_fit(const mx::Shape& a, const mx::Shape& b, size_t trailing) {
  for (size_t i = trailing + 1; i <= std::min(a.size(), b.size()); ++i) {
    int n = a[a.size() - i], m = b[b.size() - i];
    if (n != m && n != 1 && m != 1) {
      return false;
    }
  }
  return true;
}

void check_activations(const char* op, const array& x) {
  if (x.dtype() != mx::float16 && x.dtype() != mx::bfloat16 &&
      x.dtype() != mx::float32) {
    invalid(
        op,
        "Expected x of dtype float16, bfloat16 or float32. Received ",
        x.dtype(),
        ".");
  }
}

void check_row_bytes(const char* op, const array& w, const Format& format) {
  if (w.shape(-1) % format.block_bytes != 0) {
    invalid(
        op,
        "Expected rows of whole ",
        format.name,
        " blocks of ",
        format.block_bytes,
        " bytes (",
        format.block_size,
        " weights). Received w with shape ",
        w.shape(),
        ".");
  }
  int64_t K = w.shape(-1) / format.block_bytes * int64_t(format.block_size);
  if (K > INT32_MAX) {
    invalid(op, "Expected rows of at most 2^31 - 1 weights. Received ", K, ".");
  }
}

// What x's last axis must be: K when W is transposed, N when it is not.
void check_product(
    const char* op,
    const array& x,
    const array& w,
    const Format& format,
    bool transpose) {
  check_activations(op, x);
  if (x.ndim() < 1) {
    invalid(op, "Expected x with at least one axis. Received a scalar.");
  }
  if (w.ndim() < 2) {
    invalid(
        op,
        "Expected w with at least two axes [N, row_bytes]. Received shape ",
        w.shape(),
        ".");
  }
  check_row_bytes(op, w, format);
  int64_t K = w.shape(-1) / format.block_bytes * int64_t(format.block_size);
  int64_t inner = transpose ? K : w.shape(-2);
  if (x.shape(-1) != inner) {
    invalid(
        op,
        "Expected the last axis of x to be ",
        inner,
        ", the ",
        transpose ? "inputs" : "outputs",
        " of a ",
        format.name,
        " weight of shape (",
        w.shape(-2),
        ", ",
        K,
        "). Received x with shape ",
        x.shape(),
        ".");
  }
}

array product(
    const char* op,
    const array& x,
    const array& weights,
    const std::optional<array>& c,
    const std::string& qtype,
    float alpha,
    float beta,
    bool transpose,
    mx::StreamOrDevice s) {
  const Format& format = supported_format(op, qtype);
  array w = as_rows(op, weights, format, s);
  check_product(op, x, w, format, transpose);
  if (w.ndim() > 2 && x.ndim() < 2) {
    invalid(
        op,
        "Expected x with at least two axes for a batch of weights. Received x "
        "with shape ",
        x.shape(),
        " and w with shape ",
        w.shape(),
        ".");
  }
  if (!batches_fit(x.shape(), w.shape(), 2)) {
    invalid(
        op,
        "Expected batch axes of x and w that broadcast. Received x with shape ",
        x.shape(),
        " and w with shape ",
        w.shape(),
        ".");
  }
  mx::Shape shape = matmul_shape(x.shape(), w.shape(), format, transpose);
  std::vector<array> inputs{small_in_rows(x, s), w};
  if (c) {
    if (!mx::issubdtype(c->dtype(), mx::floating) ||
        !broadcasts_to(c->shape(), shape)) {
      invalid(
          op,
          "Expected a floating c that broadcasts to ",
          shape,
          ". Received ",
          c->dtype(),
          " of shape ",
          c->shape(),
          ".");
    }
    inputs.push_back(small_in_rows(mx::astype(*c, x.dtype(), s), s));
  }
  if (native_ops()) {
    return native_matmul(inputs, format, transpose, alpha, beta, s);
  }
  return array(
      std::move(shape),
      x.dtype(),
      std::make_shared<QuantizedMatmul>(
          mx::to_stream(s), MatmulState{&format, transpose, alpha, beta}),
      std::move(inputs));
}

// Indices as uint32, or 0, 1, 2, ... over the batch of `a` when none are given.
array indices_or_all(
    const char* op,
    const char* name,
    const std::optional<array>& indices,
    const array& a,
    mx::StreamOrDevice s) {
  if (!indices) {
    mx::Shape batch(a.shape().begin(), a.shape().end() - 2);
    int size = 1;
    for (int n : batch) {
      size *= n;
    }
    if (size == 0) { // MLX's CUDA backend cannot count to nothing
      return mx::zeros(batch, mx::uint32, s);
    }
    return mx::reshape(mx::arange(0, size, mx::uint32, s), batch, s);
  }
  if (!mx::issubdtype(indices->dtype(), mx::integer)) {
    invalid(
        op,
        "Expected integer ",
        name,
        ". Received dtype ",
        indices->dtype(),
        ".");
  }
  array all = *indices;
  if (mx::size_of(all.dtype()) == 8) {
    // What does not fit 32 bits must not wrap to an index that does.
    all = mx::minimum(
        mx::astype(all, mx::uint64, s), array(UINT32_MAX, mx::uint64), s);
  }
  return mx::astype(all, mx::uint32, s);
}

} // namespace

array quantized_matmul(
    const array& x,
    const array& w,
    const std::string& qtype,
    bool transpose,
    mx::StreamOrDevice s) {
  return product(
      "quantized_matmul", x, w, std::nullopt, qtype, 1.0f, 1.0f, transpose, s);
}

array quantized_addmm(
    const array& c,
    const array& x,
    const array& w,
    const std::string& qtype,
    float alpha,
    float beta,
    bool transpose,
    mx::StreamOrDevice s) {
  return product("quantized_addmm", x, w, c, qtype, alpha, beta, transpose, s);
}

array gather_qmm(
    const array& x,
    const array& weights,
    const std::string& qtype,
    const std::optional<array>& lhs_indices,
    const std::optional<array>& rhs_indices,
    bool transpose,
    bool sorted_indices,
    mx::StreamOrDevice s) {
  constexpr const char* op = "gather_qmm";
  const Format& format = supported_format(op, qtype);
  array w = as_rows(op, weights, format, s);
  check_product(op, x, w, format, transpose);
  if (w.ndim() != 3 || x.ndim() < 2) {
    invalid(
        op,
        "Expected x [..., M, K] and w [E, N, row_bytes]. Received x with "
        "shape ",
        x.shape(),
        " and w with shape ",
        w.shape(),
        ".");
  }
  array lhs = indices_or_all(op, "lhs_indices", lhs_indices, x, s);
  array rhs = indices_or_all(op, "rhs_indices", rhs_indices, w, s);
  if (!batches_fit(lhs.shape(), rhs.shape(), 0)) {
    invalid(
        op,
        "Expected lhs_indices and rhs_indices that broadcast. Received shapes ",
        lhs.shape(),
        " and ",
        rhs.shape(),
        ".");
  }
  std::vector<array> both = mx::broadcast_arrays({lhs, rhs}, s);
  std::vector<array> inputs{
      small_in_rows(x, s),
      w,
      small_in_rows(both[0], s),
      small_in_rows(both[1], s)};
  if (native_ops()) {
    return native_gather(inputs, format, transpose, s);
  }
  return array(
      gather_shape(x.shape(), w.shape(), both[0].shape(), format, transpose),
      x.dtype(),
      std::make_shared<GatherQmm>(
          mx::to_stream(s), &format, transpose, sorted_indices),
      std::move(inputs));
}

array dequantize(
    const array& weights,
    const std::string& qtype,
    mx::Dtype dtype,
    mx::StreamOrDevice s) {
  constexpr const char* op = "dequantize";
  const Format& format = supported_format(op, qtype);
  if (dtype != mx::float16 && dtype != mx::bfloat16 && dtype != mx::float32) {
    invalid(
        op,
        "Expected dtype float16, bfloat16 or float32. Received ",
        dtype,
        ".");
  }
  if (weights.ndim() < 1) {
    invalid(op, "Expected w with at least one axis. Received a scalar.");
  }
  array w = as_rows(op, weights, format, s);
  check_row_bytes(op, w, format);
  if (native_ops()) {
    return native_dequantize(w, format, dtype, s);
  }
  return array(
      dequantize_shape(w.shape(), format),
      dtype,
      std::make_shared<Dequantize>(mx::to_stream(s), &format, dtype),
      {w});
}

} // namespace mlx_gguf
