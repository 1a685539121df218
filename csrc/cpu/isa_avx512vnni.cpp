// The kernels for AVX-512 with VNNI and GFNI: Ice Lake, Zen 4 and later.
#define MLX_GGUF_ISA avx512vnni
#include "cpu/fixed_types.h"

MLX_GGUF_FIXED_ISA(avx512vnni)
