// Operations of mx.fast on the CPU, for mlx_gguf.cpu_fast.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/variant.h>

#include "bindings/bindings.h"
#include "cpu/fast.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mlx_gguf {

void bind_fast(nb::module_& m) {
  m.def(
      "cpu_rms_norm",
      &cpu::rms_norm,
      "x"_a,
      "weight"_a.none(),
      "eps"_a,
      "stream"_a = nb::none(),
      nb::sig(
          "def cpu_rms_norm(x: mlx.core.array, weight: mlx.core.array | None, "
          "eps: float, stream: mlx.core.Stream | mlx.core.DeviceType | "
          "mlx.core.Device | None = None) -> mlx.core.array | None"),
      "mx.fast.rms_norm as one node; None where MLX's is to be called.");
  m.def(
      "cpu_rope",
      &cpu::rope,
      "x"_a,
      "dims"_a,
      "traditional"_a,
      "base"_a.none(),
      "scale"_a,
      "offset"_a,
      "freqs"_a = nb::none(),
      "stream"_a = nb::none(),
      nb::sig(
          "def cpu_rope(x: mlx.core.array, dims: int, traditional: bool, "
          "base: float | None, scale: float, offset: int | mlx.core.array, "
          "freqs: mlx.core.array | None = None, stream: mlx.core.Stream | "
          "mlx.core.DeviceType | mlx.core.Device | None = None) -> "
          "mlx.core.array | None"),
      "mx.fast.rope as one node; None where MLX's is to be called.");
  m.def(
      "cpu_gate",
      &cpu::gate,
      "x"_a,
      "gelu"_a,
      "stream"_a = nb::none(),
      nb::sig(
          "def cpu_gate(x: mlx.core.array, gelu: bool, stream: "
          "mlx.core.Stream | mlx.core.DeviceType | mlx.core.Device | None = "
          "None) -> mlx.core.array | None"),
      "nn.gelu_approx, or nn.silu, as one node; None where MLX's is to be "
      "called.");
  m.def(
      "cpu_logsumexp",
      &cpu::logsumexp,
      "x"_a,
      "stream"_a = nb::none(),
      nb::sig(
          "def cpu_logsumexp(x: mlx.core.array, stream: mlx.core.Stream | "
          "mlx.core.DeviceType | mlx.core.Device | None = None) -> "
          "mlx.core.array | None"),
      "mx.logsumexp over the last axis, which is kept, as one node; None "
      "where\n"
      "MLX's is to be called.");
  m.def(
      "cpu_attention",
      &cpu::attention,
      "q"_a,
      "k"_a,
      "v"_a,
      "scale"_a,
      "causal"_a = false,
      "mask"_a = nb::none(),
      "stream"_a = nb::none(),
      nb::sig(
          "def cpu_attention(q: mlx.core.array, k: mlx.core.array, v: "
          "mlx.core.array, scale: float, causal: bool = False, mask: "
          "mlx.core.array | None = None, stream: mlx.core.Stream | "
          "mlx.core.DeviceType | mlx.core.Device | None = None) -> "
          "mlx.core.array | None"),
      "mx.fast.scaled_dot_product_attention as one node, without sinks; None\n"
      "where MLX's is to be called.");
}

} // namespace mlx_gguf
