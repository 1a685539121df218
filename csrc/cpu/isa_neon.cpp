// The kernels for NEON, which every 64-bit Arm processor has.
#define MLX_GGUF_ISA neon
#include "cpu/fixed_types.h"

MLX_GGUF_FIXED_ISA(neon)
