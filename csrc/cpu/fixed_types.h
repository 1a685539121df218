// The fixed-point kernels of an instruction set, added to those of every type.
#pragma once

#include "cpu/fast_kernels.h"
#ifdef MLX_GGUF_TILES
#include "cpu/amx_gemm.h"
#else
#include "cpu/fixed_gemm.h"
#endif

namespace mlx_gguf::cpu::MLX_GGUF_ISA {
namespace {

template <typename... Types>
TypeKernels add_fixed(TypeKernels kernels, uint32_t id) {
  auto add = [&]<typename Type>() {
    kernels.gemv = gemv<Type>;
    kernels.gemm = gemm<Type>;
    kernels.order = Order<Type>::table.at;
    kernels.groups_of_32 = Codes<Type>::group == 32;
    kernels.tiles_in_order = Codes<Type>::has_whole;
    kernels.planes = in_planes<Type>;
    kernels.bias = bias_in_x<Type>;
    kernels.bias_of_all = Codes<Type>::whole_scales && bias_in_x<Type> != 0;
  };
  ((Types::id == id ? add.template operator()<Types>() : void()), ...);
  return kernels;
}

TypeKernels fixed_type(uint32_t id) {
  return add_fixed<
      Q4_0,
      Q4_1,
      Q5_0,
      Q5_1,
      Q8_0,
      Q2_K,
      Q3_K,
      Q4_K,
      Q5_K,
      Q6_K,
      IQ4_NL,
      IQ4_XS,
      MXFP4>(type(id), id);
}

} // namespace
} // namespace mlx_gguf::cpu::MLX_GGUF_ISA

// Defines mlx_gguf::cpu::isa_NAME.
#define MLX_GGUF_FIXED_ISA(NAME)                              \
  namespace mlx_gguf::cpu {                                   \
  static_assert(NAME::gemm_tile_rows <= most_gemm_rows);      \
  static_assert(NAME::gemm_tile_rows % NAME::gemm_unit == 0); \
  extern const Isa isa_##NAME;                                \
  const Isa isa_##NAME{                                       \
      #NAME,                                                  \
      NAME::fixed_type,                                       \
      NAME::to_f32,                                           \
      NAME::from_f32,                                         \
      NAME::fixed_bytes,                                      \
      NAME::fix,                                              \
      NAME::packed_bytes,                                     \
      NAME::pack,                                             \
      NAME::gemm_tile_rows,                                   \
      NAME::gemm_unit,                                        \
      NAME::axpy,                                             \
      NAME::fast};                                            \
  }
