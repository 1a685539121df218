// The gated delta rule, for mlx_gguf.gated_delta.
#include "delta.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include "bindings/bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mlx_gguf {

void bind_delta(nb::module_& m) {
  m.def(
      "gated_delta",
      [](const array& q,
         const array& k,
         const array& v,
         const array& g,
         const array& beta,
         const array& state,
         const std::optional<array>& mask) {
        return gated_delta(q, k, v, g, beta, state, mask);
      },
      "q"_a,
      "k"_a,
      "v"_a,
      "g"_a,
      "beta"_a,
      "state"_a,
      "mask"_a.none(),
      nb::sig(
          "def gated_delta(q: mlx.core.array, k: mlx.core.array, v: "
          "mlx.core.array, g: mlx.core.array, beta: mlx.core.array, state: "
          "mlx.core.array, mask: mlx.core.array | None) -> "
          "tuple[mlx.core.array, mlx.core.array] | None"),
      "Outputs and last states as one node; None where no kernel takes them.");
}

} // namespace mlx_gguf
