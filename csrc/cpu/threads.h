// A pool of threads that lives as long as the process.
#pragma once

#include <cstdint>
#include <functional>

namespace mlx_gguf::cpu {

// Threads a parallel loop runs on: MLX_GGUF_NUM_THREADS, else the processors
// this process may use.
int num_threads();

// Calls body(i) for every i in [0, n), on several threads, and returns when all
// are done. The first exception is rethrown here. A loop that starts while the
// pool is busy (another stream, or a nested loop) runs on its caller alone, so
// results must not depend on which thread runs what.
void parallel_for(int64_t n, const std::function<void(int64_t)>& body);

} // namespace mlx_gguf::cpu
