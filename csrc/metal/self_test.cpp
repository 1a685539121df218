#include "metal/self_test.h"

#include <cstdint>

namespace mlx_gguf::metal {

bool keeps_half_subnormals(
    MTL::Device* device, MTL::ComputePipelineState* half_test) {
  // The codes of a word's halves: all of 10 bits, up in one and down in the
  // other. Threads as geometry() has them; buffers as in metal/half_test.h.
  constexpr uint32_t count = 1024;
  constexpr uint32_t threads = 32;
  auto pool = NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
  auto w = NS::TransferPtr(device->newBuffer(
      count * sizeof(uint32_t), MTL::ResourceStorageModeShared));
  auto y = NS::TransferPtr(device->newBuffer(
      2 * count * sizeof(float), MTL::ResourceStorageModeShared));
  auto queue = NS::TransferPtr(device->newCommandQueue());
  if (!w || !y || !queue) {
    return false;
  }
  auto* codes = static_cast<uint32_t*>(w->contents());
  for (uint32_t i = 0; i < count; ++i) {
    codes[i] = i | (count - 1 - i) << 16;
  }

  MTL::CommandBuffer* commands = queue->commandBuffer();
  MTL::ComputeCommandEncoder* encoder = commands->computeCommandEncoder();
  encoder->setComputePipelineState(half_test);
  encoder->setBuffer(w.get(), 0, 0);
  encoder->setBuffer(y.get(), 0, 3);
  encoder->dispatchThreadgroups(
      MTL::Size(count / threads, 1, 1), MTL::Size(threads, 1, 1));
  encoder->endEncoding();
  commands->commit();
  commands->waitUntilCompleted();
  if (commands->status() != MTL::CommandBufferStatusCompleted) {
    return false;
  }

  auto* found = static_cast<const float*>(y->contents());
  for (uint32_t i = 0; i < count; ++i) {
    if (found[2 * i] != static_cast<float>(i) ||
        found[2 * i + 1] != static_cast<float>(count - 1 - i)) {
      return false;
    }
  }
  return true;
}

} // namespace mlx_gguf::metal
