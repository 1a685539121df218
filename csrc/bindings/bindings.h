// One function per group of bindings, called by module.cpp.
#pragma once

#include <nanobind/nanobind.h>

namespace mlx_gguf {

void bind_formats(nanobind::module_& m);
void bind_ops(nanobind::module_& m);
void bind_gguf(nanobind::module_& m);
void bind_cpu(nanobind::module_& m);
void bind_fast(nanobind::module_& m);
void bind_cuda(nanobind::module_& m);
void bind_delta(nanobind::module_& m);
void bind_plans(nanobind::module_& m);
void bind_step(nanobind::module_& m);
void bind_tokenizer(nanobind::module_& m);

} // namespace mlx_gguf
