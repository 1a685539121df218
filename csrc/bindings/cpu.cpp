// What Python may ask about the CPU backend.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "cpu/kernels.h"
#include "cpu/read_floor.h"
#include "cpu/threads.h"
#include "mlx/array.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mlx_gguf {

void bind_cpu(nb::module_& m) {
  m.def(
      "cpu_isa",
      [] { return std::string(cpu::isa().name); },
      "The instruction set in use; MLX_GGUF_ISA overrides it.");
  m.def(
      "cpu_isas",
      [] {
        std::vector<std::string> names;
        for (const cpu::Isa* isa : cpu::isas()) {
          names.emplace_back(isa->name);
        }
        return names;
      },
      "The instruction sets of this machine, the best first.");
  m.def(
      "cpu_threads",
      &cpu::num_threads,
      "Threads of a product; MLX_GGUF_NUM_THREADS overrides it.");
  m.def(
      "read_seconds",
      [](mlx::core::array a) {
        a.eval();
        auto data = a.data<uint8_t>();
        nb::gil_scoped_release release;
        return cpu::read_seconds(data, static_cast<int64_t>(a.nbytes()));
      },
      "a"_a,
      nb::sig("def read_seconds(a: mlx.core.array) -> float"),
      "Seconds in which all threads read the array's bytes once.");
  m.def(
      "peak_f32",
      &cpu::peak_f32,
      nb::call_guard<nb::gil_scoped_release>(),
      "Float32 operations a second of all threads that do nothing but\n"
      "multiply and add, with the instructions of cpu_isa().");
  m.def(
      "peak_int8",
      &cpu::peak_int8,
      nb::call_guard<nb::gil_scoped_release>(),
      "The same of int8 dot products; 0.0 where cpu_isa() is without them.");
}

} // namespace mlx_gguf
