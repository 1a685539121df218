// The kernels for AVX-512 with VNNI, GFNI and tiles of AMX: Sapphire Rapids and
// later.
#define MLX_GGUF_ISA avx512amx
#define MLX_GGUF_TILES
#include "cpu/fixed_types.h"

MLX_GGUF_FIXED_ISA(avx512amx)
