// Kernels as nodes of the graph that MLX's encoder builds for a stream.
#pragma once

#include <optional>
#include <vector>

#include "../primitives.h"
#include "cuda/module.h"

namespace mlx_gguf::cuda {

// How one kernel is launched. Every block of a cluster runs at once.
struct Launch {
  dim3 grid;
  dim3 block;
  int64_t shared_bytes = 0;
  int cluster = 1;
  // It calls wait_for_previous(), so that it may run beside the kernel before
  // it, where starts_early().
  bool early = false;
};

// An array of so many bytes, or a few more, in the device's own memory, with
// numbers that mean nothing: a node of the stream that has been enqueued. MLX
// exports no way to ask for such memory, and its allocator's own is shared with
// the host.
array device_memory(int64_t nbytes, mx::Stream s);

// Where an array starts on the device; nullptr for none and for an empty one,
// which has no buffer.
void* address(const std::optional<array>& a);

// While one is alive, what its thread enqueues goes to this CUDA stream
// instead, in the order of the calls whatever they read and write.
class AtOnce {
 public:
  explicit AtOnce(CUstream stream);
  ~AtOnce();
  AtOnce(const AtOnce&) = delete;
  AtOnce& operator=(const AtOnce&) = delete;
};

// The same for a graph, whose nodes follow each other.
class Recorded {
 public:
  explicit Recorded(CUgraph graph);
  ~Recorded();
  Recorded(const Recorded&) = delete;
  Recorded& operator=(const Recorded&) = delete;
};

// Whether the next kernel of this thread is one of a graph, after another, on a
// device that lets it start early.
bool starts_early();

// `inputs` and `out` order the node among others; `arguments` point to what the
// kernel is given.
void enqueue(
    CUfunction kernel,
    const Launch& launch,
    std::vector<const std::optional<array>*> inputs,
    array& out,
    std::vector<void*> arguments,
    mx::Stream s);

} // namespace mlx_gguf::cuda
