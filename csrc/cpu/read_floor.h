// The least time in which this machine's processors can read some bytes.
#pragma once

#include <cstdint>

namespace mlx_gguf::cpu {

// Seconds of one pass over `bytes` of memory by all threads, which read 64
// bytes at a time and do nothing else.
double read_seconds(const uint8_t* data, int64_t bytes);

} // namespace mlx_gguf::cpu
