// The kernels for AVX-512 with VNNI and BMI2: integer dot products for few rows
// of x, the others as for AVX-512.
#define MLX_GGUF_ISA avx512vnni
#include "cpu/kernels_impl.h"
#include "cpu/vnni_product.h"

namespace mlx_gguf::cpu {

namespace {

using namespace avx512vnni;

template <typename... Types>
TypeKernels with_gemv(uint32_t id) {
  TypeKernels kernels = type(id);
  ((Types::id == id ? void(kernels.gemv = gemv<Types>) : void()), ...);
  return kernels;
}

// All but the plain types and MXFP4, whose scales reach so far that a bias
// times one could overflow.
TypeKernels all_types(uint32_t id) {
  return with_gemv<
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
      IQ4_XS>(id);
}

} // namespace

extern const Isa isa_avx512vnni;
const Isa isa_avx512vnni{
    "avx512vnni",
    all_types,
    avx512vnni::to_f32,
    avx512vnni::from_f32,
    avx512vnni::fixed_bytes,
    avx512vnni::fix,
    avx512vnni::axpy};

} // namespace mlx_gguf::cpu
