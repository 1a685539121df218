// The kernels for AVX-512 F, BW, DQ and VL.
#define MLX_GGUF_ISA avx512
#include "cpu/kernels_impl.h"

namespace mlx_gguf::cpu {

extern const Isa isa_avx512;
const Isa isa_avx512{
    "avx512",
    avx512::type,
    avx512::to_f32,
    avx512::from_f32,
    nullptr,
    nullptr,
    avx512::axpy};

} // namespace mlx_gguf::cpu
