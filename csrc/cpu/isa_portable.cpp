// The kernels for the architecture's baseline.
#define MLX_GGUF_ISA portable
#include "cpu/fast_kernels.h"

namespace mlx_gguf::cpu {

extern const Isa isa_portable;
const Isa isa_portable{
    .name = "portable",
    .type = portable::type,
    .to_f32 = portable::to_f32,
    .from_f32 = portable::from_f32,
    .axpy = portable::axpy,
    .fast = portable::fast};

} // namespace mlx_gguf::cpu
