// How 64 codes meet 64 words of x.
#pragma once

#if defined(__x86_64__)
#include "cpu/products_x86.h"
#else
#include "cpu/products_neon.h"
#endif
