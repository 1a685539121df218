// The kernels for NEON with dot products of bytes (FEAT_DotProd).
#define MLX_GGUF_ISA neon_dotprod
#define MLX_GGUF_DOTPROD
#include "cpu/fixed_types.h"

MLX_GGUF_FIXED_ISA(neon_dotprod)
