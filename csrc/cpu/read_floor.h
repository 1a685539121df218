// The least time in which this machine's processors can read some bytes, and
// the most arithmetic they can do: the roofs of a product's speed.
#pragma once

#include <cstdint>

namespace mlx_gguf::cpu {

// Seconds of one pass over `bytes` of memory by all threads, which read 16
// bytes at a time and do nothing else.
double read_seconds(const uint8_t* data, int64_t bytes);

// Operations a second of all threads, a multiply-add being two, which multiply
// and add registers and do nothing else, with the instructions of isa().
double peak_f32();

// The same of int8 dot products; 0 where isa() does without them.
double peak_int8();

} // namespace mlx_gguf::cpu
