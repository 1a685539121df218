// The whole device code. The build flattens this into one string, to which the
// host appends an explicit instantiation for the kernel it wants.
#include "attend.h"
#include "delta.h"
#include "delta_step.h"
#include "dequantize.h"
#include "experts_step.h"
#include "gemm.h"
#include "gemm_block.h"
#include "gemv.h"
#include "gemv_block.h"
#include "gemv_tma.h"
#include "step.h"
