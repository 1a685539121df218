// F32, F16 and BF16: a block is one weight, and K may be anything.
#pragma once
#include "../common.h"

template <typename S>
struct Plain {
  typedef S Stored;
};
typedef Plain<float> F32;
typedef Plain<half_t> F16;
typedef Plain<bfloat_t> BF16;
