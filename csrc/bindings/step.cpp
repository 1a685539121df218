// A token's way through a model's layers, for mlx_gguf.step.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "cuda/names.h"
#include "step.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mlx_gguf {

namespace {

// Weights, their type, a bias.
using Part = std::tuple<array, std::string, std::optional<array>>;

Projection projection(const Part& part) {
  auto& [w, qtype, bias] = part;
  return {w, &supported_format("Stack", qtype), bias};
}

std::vector<Projection> projections(const std::vector<Part>& parts) {
  std::vector<Projection> out;
  for (const Part& part : parts) {
    out.push_back(projection(part));
  }
  return out;
}

// Gates, taps, dt_bias, a_log, norm.
using Delta = std::tuple<array, array, array, array, array>;

// Router, gate and up, down.
using Experts = std::tuple<array, std::vector<Part>, Part>;

void add_layer(
    Stack& stack,
    const array& input_norm,
    const std::vector<Part>& in,
    const std::optional<array>& q_norm,
    const std::optional<array>& k_norm,
    const std::optional<Delta>& delta,
    const Part& output,
    const array& mlp_norm,
    const std::vector<Part>& gate_up,
    const std::optional<Part>& down,
    const std::optional<Experts>& experts) {
  std::optional<DeltaLayer> own;
  if (delta) {
    own = std::make_from_tuple<DeltaLayer>(*delta);
  }
  std::optional<ExpertLayer> mixture;
  if (experts) {
    auto& [router, both, last] = *experts;
    mixture = {router, projections(both), projection(last)};
  }
  stack.add(
      {input_norm,
       projections(in),
       q_norm,
       k_norm,
       own,
       projection(output),
       mlp_norm,
       projections(gate_up),
       down ? std::optional(projection(*down)) : std::nullopt,
       mixture});
}

} // namespace

void bind_step(nb::module_& m) {
  nb::class_<Stack>(m, "Stack", "A model's layers and its last norm.")
      .def(
          nb::new_([](const array& norm,
                      int inner,
                      int heads,
                      int kv_heads,
                      int head_dim,
                      bool gated,
                      float eps,
                      float scale,
                      bool traditional,
                      float gain,
                      std::vector<double> speeds,
                      const std::tuple<int, int, int, int, bool>& delta,
                      const std::tuple<int, int, int, bool>& experts) {
            auto [rule_heads, key_heads, width, taps, tiled] = delta;
            auto [count, used, expert_inner, normalised] = experts;
            int hidden = norm.ndim() > 0 ? norm.shape(0) : 0;
            return std::make_shared<Stack>(
                Sizes{
                    hidden,
                    inner,
                    heads,
                    kv_heads,
                    head_dim,
                    gated,
                    eps,
                    scale,
                    traditional,
                    gain,
                    std::move(speeds),
                    {rule_heads, key_heads, width, taps, tiled},
                    {count, used, expert_inner, normalised}},
                norm);
          }),
          "norm"_a,
          nb::kw_only(),
          "inner"_a,
          "heads"_a,
          "kv_heads"_a,
          "head_dim"_a,
          "gated"_a,
          "eps"_a,
          "scale"_a,
          "traditional"_a,
          "gain"_a,
          "speeds"_a,
          "delta"_a,
          "experts"_a)
      .def(
          "add_layer",
          &add_layer,
          nb::kw_only(),
          "input_norm"_a,
          "in_"_a,
          "q_norm"_a.none(),
          "k_norm"_a.none(),
          "delta"_a.none(),
          "output"_a,
          "mlp_norm"_a,
          "gate_up"_a,
          "down"_a.none(),
          "experts"_a.none(),
          "Layers in their order; ValueError where shapes do not fit.")
      .def_prop_ro(
          "cuda_functions",
          [](const Stack& self) {
            return cuda::all_functions(self.sizes(), self.dtype());
          },
          "C++ names of CUDA kernels for it, beside those of products.")
      .def_prop_ro(
          "dtype",
          &Stack::dtype,
          nb::sig("def dtype(self) -> mlx.core.Dtype"),
          "Of activations.");
  nb::class_<History>(
      m, "History", "What layers keep, which steps write to in place.")
      .def_ro("capacity", &History::capacity, "Tokens it has room for.")
      .def("nbytes", &History::nbytes, "layer"_a, "Of a layer's cache.");
  m.def(
      "begin_history",
      [](std::shared_ptr<Stack> stack,
         const std::vector<array>& first,
         const std::vector<array>& second,
         int length) { return begin_history(stack, first, second, length); },
      "stack"_a,
      "first"_a,
      "second"_a,
      "length"_a,
      nb::sig(
          "def begin_history(stack: Stack, first: "
          "collections.abc.Sequence[mlx.core.array], second: "
          "collections.abc.Sequence[mlx.core.array], length: int) -> History "
          "| None"),
      "A copy of a cache's two arrays a layer; of keys and values of the "
      "first\n"
      "``length`` rows, with room for more. None if they are not the stack's.");
  m.def(
      "step",
      [](const std::shared_ptr<History>& history,
         const array& x,
         int position,
         const std::optional<array>& last) {
        return step(history, x, position, last);
      },
      nb::arg(),
      nb::arg(),
      nb::arg(),
      nb::arg().none(),
      nb::sig(
          "def step(history: History, x: mlx.core.array, position: int, last: "
          "mlx.core.array | None, /) -> mlx.core.array | None"),
      "All layers and the last norm as one node; None where the layers are to\n"
      "be called. ``last`` is what the step before gave.");
  m.def(
      "read_history",
      [](const std::shared_ptr<History>& history,
         int layer,
         const std::optional<array>& last) {
        return read_history(history, layer, last);
      },
      "history"_a,
      "layer"_a,
      "last"_a.none(),
      nb::sig(
          "def read_history(history: History, layer: int, last: "
          "mlx.core.array | None) -> tuple[mlx.core.array, mlx.core.array]"),
      "What a layer keeps after the step that gave ``last``; no other may\n"
      "follow.");
}

} // namespace mlx_gguf
