// The kernels for AVX-512 without VNNI.
#define MLX_GGUF_ISA avx512
#include "cpu/fixed_types.h"

MLX_GGUF_FIXED_ISA(avx512)
