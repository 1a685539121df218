// The kernels for AVX2, FMA and F16C.
#define MLX_GGUF_ISA avx2
#include "cpu/fixed_types.h"

MLX_GGUF_FIXED_ISA(avx2)
