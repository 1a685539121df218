// The operations, with the signatures of mx.quantized_matmul, mx.addmm,
// mx.gather_qmm and mx.dequantize where the packed type takes the place of
// scales, biases, group size and bits.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "export.h"
#include "mlx/utils.h"
#include "ops.h"
#include "parts.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mlx_gguf {

void bind_ops(nb::module_& m) {
  m.def(
      "quantized_matmul",
      &quantized_matmul,
      nb::arg(),
      nb::arg(),
      "qtype"_a,
      "transpose"_a = true,
      nb::kw_only(),
      "stream"_a = nb::none(),
      nb::sig(
          "def quantized_matmul(x: mlx.core.array, w: mlx.core.array, /, "
          "qtype: str, transpose: bool = True, *, stream: mlx.core.DeviceType "
          "| "
          "mlx.core.Stream | mlx.core.Device | mlx.core.DeviceType | None = "
          "None) "
          "-> "
          "mlx.core.array"),
      R"(
Multiply by a matrix in a GGUF tensor type.

Computes ``x @ W.T``, or ``x @ W`` when ``transpose`` is false, where ``W`` of
shape ``(N, K)`` is read as packed in the file. Products are exact and summed
in float32; the result is rounded once, to the dtype of ``x``. A row's result
does not depend on the other rows of ``x``. On CUDA both end at 256 rows of a
16-bit ``x`` and a packed ``W`` of 2**20 to 2**27 weights: they are rounded to
the dtype of ``x`` and multiplied by MLX, unless ``MLX_GGUF_CUDA_DENSE=0`` is
in the environment.

Parameters
----------
x : array
    Activations ``[..., K]`` (``[..., N]`` when ``transpose`` is false);
    float16, bfloat16 or float32.
w : array
    Packed weights, uint8 ``[N, row_bytes]``; or a batch of them
    ``[..., N, row_bytes]`` whose batch axes broadcast with those of ``x``.
    Weights of type f32, f16 and bf16 may also come in their own dtype,
    ``[..., N, K]``.
qtype : str
    Tensor type as GGUF names it, in any case: ``"q4_k"``. See ``formats()``.
transpose : bool
    Whether ``W`` is transposed.
stream : Stream or Device, optional

Returns
-------
array
    ``[..., N]`` (``[..., K]`` when ``transpose`` is false), dtype of ``x``.

Raises
------
ValueError
    Unknown or unsupported type, or shapes or dtypes that do not fit.
)");

  m.def(
      "quantized_matmul_parts",
      [](const mx::array& x,
         const mx::array& w,
         const std::string& qtype,
         const std::vector<int>& ends,
         const std::optional<mx::array>& bias) {
        return quantized_matmul_parts(x, w, qtype, ends, bias);
      },
      nb::arg(),
      nb::arg(),
      nb::arg(),
      nb::arg(),
      nb::arg().none() = nb::none(),
      nb::sig(
          "def quantized_matmul_parts(x: mlx.core.array, w: mlx.core.array, "
          "qtype: str, ends: collections.abc.Sequence[int], bias: "
          "mlx.core.array | None = None, /) -> list[mlx.core.array]"),
      "``mx.split(quantized_matmul(x, w, qtype), ends, -1)``, or that of\n"
      "quantized_addmm with a bias, as one node.");
  m.def(
      "quantized_addmm",
      &quantized_addmm,
      nb::arg(),
      nb::arg(),
      nb::arg(),
      "qtype"_a,
      "alpha"_a = 1.0f,
      "beta"_a = 1.0f,
      "transpose"_a = true,
      nb::kw_only(),
      "stream"_a = nb::none(),
      nb::sig(
          "def quantized_addmm(c: mlx.core.array, x: mlx.core.array, w: "
          "mlx.core.array, /, qtype: str, alpha: float = 1.0, beta: float = "
          "1.0, transpose: bool = True, *, stream: mlx.core.Stream | "
          "mlx.core.DeviceType | "
          "mlx.core.Device | None = None) -> mlx.core.array"),
      R"(
Multiply by a matrix in a GGUF tensor type and add.

Computes ``alpha * x @ W.T + beta * c`` in float32 and rounds once.

Parameters
----------
c : array
    Broadcasts to the product's shape; any floating dtype, cast to that of ``x``.
x, w, qtype, transpose, stream
    As in :func:`quantized_matmul`.
alpha, beta : float

Returns
-------
array
    Shape of the product, dtype of ``x``.

Raises
------
ValueError
    As :func:`quantized_matmul`, or ``c`` does not broadcast.
)");

  m.def(
      "gather_qmm",
      &gather_qmm,
      nb::arg(),
      nb::arg(),
      "qtype"_a,
      "lhs_indices"_a = nb::none(),
      "rhs_indices"_a = nb::none(),
      "transpose"_a = true,
      nb::kw_only(),
      "sorted_indices"_a = false,
      "stream"_a = nb::none(),
      nb::sig(
          "def gather_qmm(x: mlx.core.array, w: mlx.core.array, /, qtype: str, "
          "lhs_indices: mlx.core.array | None = None, rhs_indices: "
          "mlx.core.array | None = None, transpose: bool = True, *, "
          "sorted_indices: bool = False, stream: mlx.core.Stream | "
          "mlx.core.DeviceType | "
          "mlx.core.Device | None = None) -> mlx.core.array"),
      R"(
Multiply gathered matrices: a mixture of experts.

For every pair of indices computes ``x[lhs] @ W[rhs].T`` (or ``x[lhs] @
W[rhs]``), where the indices run over the flattened batch of ``x`` and over the
experts of ``w``.

Parameters
----------
x : array
    Activations ``[..., M, K]``; float16, bfloat16 or float32.
w : array
    Packed experts, uint8 ``[E, N, row_bytes]``.
qtype : str
    Tensor type as GGUF names it, in any case.
lhs_indices, rhs_indices : array, optional
    Integers that broadcast against each other; all of ``x`` and all experts
    when left out.
transpose : bool
    Whether the experts are transposed.
sorted_indices : bool
    A promise that ``rhs_indices`` ascend, which may be faster.
stream : Stream or Device, optional

Returns
-------
array
    ``[indices..., M, N]``, dtype of ``x``.

Raises
------
ValueError
    Unknown or unsupported type, or shapes or dtypes that do not fit.
RuntimeError
    An index out of range; raised when the result is evaluated, on the CPU.
)");

  m.def(
      "dequantize",
      [](const mx::array& w,
         const std::string& qtype,
         std::optional<mx::Dtype> dtype,
         mx::StreamOrDevice s) {
        return dequantize(w, qtype, dtype.value_or(mx::float32), s);
      },
      nb::arg(),
      "qtype"_a,
      "dtype"_a = nb::none(),
      nb::kw_only(),
      "stream"_a = nb::none(),
      nb::sig(
          "def dequantize(w: mlx.core.array, /, qtype: str, dtype: "
          "mlx.core.Dtype | None = None, *, stream: mlx.core.Stream | "
          "mlx.core.DeviceType | "
          "mlx.core.Device | None = None) -> mlx.core.array"),
      R"(
The numbers behind packed weights.

Parameters
----------
w : array
    Packed weights, uint8 ``[..., row_bytes]``.
qtype : str
    Tensor type as GGUF names it, in any case.
dtype : Dtype, optional
    float32 (the default), float16 or bfloat16. Values are those of the format
    in float32, rounded once.
stream : Stream or Device, optional

Returns
-------
array
    ``[..., K]`` in ``dtype``.

Raises
------
ValueError
    Unknown or unsupported type, rows that are not whole blocks, other dtypes.
)");

  m.def("set_native_ops", &set_native_ops, "on"_a);
  m.def("native_ops", &native_ops);
}

} // namespace mlx_gguf
