// The kernels for AVX2, FMA and F16C.
#define MLX_GGUF_ISA avx2
#include "cpu/kernels_impl.h"

namespace mlx_gguf::cpu {

extern const Isa isa_avx2;
const Isa isa_avx2{
    "avx2",
    avx2::type,
    avx2::to_f32,
    avx2::from_f32,
    nullptr,
    nullptr,
    avx2::axpy};

} // namespace mlx_gguf::cpu
