// The extension module mlx_gguf._ext.
#include <nanobind/nanobind.h>

#include "bindings/bindings.h"
#include "mlx/array.h"
#include "mlx/version.h"

namespace nb = nanobind;

namespace {

// mlx.core.array must be the class that our functions take. It is when both
// extensions share nanobind's type registry, which needs one ABI.
bool shares_mlx_types() {
  return nb::type<mlx::core::array>().is_valid();
}

} // namespace

NB_MODULE(_ext, m) {
  m.doc() = "GGUF tensors in MLX: operations, tensor types and files.";
  nb::module_::import_("mlx.core");

  m.attr("built_with_mlx") = MLX_GGUF_BUILT_WITH_MLX;
  m.attr("built_with_nanobind") = MLX_GGUF_NANOBIND;
  m.attr("running_mlx") = mlx::core::version();
  m.attr("shares_mlx_types") = shares_mlx_types();

  // MLX, whose settings these are too, switches them off.
  m.def("set_leak_warnings", nb::set_leak_warnings, nb::arg("value"));

  mlx_gguf::bind_formats(m);
  mlx_gguf::bind_ops(m);
  mlx_gguf::bind_gguf(m);
  mlx_gguf::bind_cpu(m);
  mlx_gguf::bind_fast(m);
  mlx_gguf::bind_cuda(m);
  mlx_gguf::bind_delta(m);
  mlx_gguf::bind_plans(m);
  mlx_gguf::bind_step(m);
  mlx_gguf::bind_tokenizer(m);
}
