// The table of tensor types as Python sees it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>

#include <variant>

#include "bindings/bindings.h"
#include "formats.h"
#include "mlx/dtype.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mlx_gguf {

void bind_formats(nb::module_& m) {
  nb::class_<Format>(m, "Format", R"(
One tensor type of GGUF.

Attributes
----------
name : str
    As GGUF spells it, in lower case: ``"q4_k"``.
id : int
    ggml's number of the type, as stored in files.
block_size : int
    Weights in a block. Blocks lie along a row of K weights.
block_bytes : int
    Bytes of a block.
alignment : int
    Alignment in bytes of a block in an aligned tensor; 0 if unsupported.
supported : bool
    Whether the operations take the type. Others can be inspected only.
tolerance : float
    Bound on the relative L2 error of a float32 result against float64.
packed : bool
    Whether weights come as packed bytes rather than plain numbers.
bits_per_weight : float
)")
      .def_ro("name", &Format::name)
      .def_ro("id", &Format::id)
      .def_ro("block_size", &Format::block_size)
      .def_ro("block_bytes", &Format::block_bytes)
      .def_ro("alignment", &Format::alignment)
      .def_ro("supported", &Format::supported)
      .def_ro("tolerance", &Format::tolerance)
      .def_prop_ro("packed", &Format::packed)
      .def_prop_ro("bits_per_weight", &Format::bits_per_weight)
      .def("row_bytes", &Format::row_bytes, "K"_a)
      .def("__repr__", [](const Format& f) {
        return "Format(" + std::string(f.name) + ", " +
               std::to_string(f.block_size) + " weights in " +
               std::to_string(f.block_bytes) + " bytes)";
      });

  m.def(
      "formats",
      [] {
        nb::list all;
        for (const Format& f : formats()) {
          all.append(nb::cast(&f, nb::rv_policy::reference));
        }
        return all;
      },
      nb::sig("def formats() -> list[Format]"),
      "Every tensor type known by name, ordered by id.");

  m.def(
      "find_format",
      [](std::variant<uint32_t, std::string> key) {
        return std::holds_alternative<uint32_t>(key)
                   ? find_format(std::get<uint32_t>(key))
                   : find_format(std::string_view(std::get<std::string>(key)));
      },
      "name_or_id"_a,
      nb::rv_policy::reference,
      nb::sig("def find_format(name_or_id: int | str) -> Format | None"),
      "The type of a name (in any case) or ggml id, or None.");
}

} // namespace mlx_gguf
