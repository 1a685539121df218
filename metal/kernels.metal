// The whole device code. The build flattens this into one string, to which the
// host appends an explicit instantiation for every kernel it wants.
#include "dequantize.h"
#include "gather.h"
#include "gemm.h"
#include "gemv.h"
#include "half_test.h"
