// Stands in for MLX's header of this name, so that the host side of the Metal
// backend runs without Metal: a launch is recorded and executed by its meaning,
// as metal/ documents it, on MLX's CPU stream.
#pragma once

#include <array>
#include <cstring>
#include <optional>

#include "formats.h"
#include "mlx/array.h"
#include "mlx/stream.h"
#include "plan.h"

#include "../metal/params.h"

namespace MTL {

struct Size {
  Size(size_t width, size_t height, size_t depth)
      : width(width), height(height), depth(depth) {}
  size_t width, height, depth;
};

// What was asked for takes the place of the compiled kernel.
struct ComputePipelineState {
  mlx_gguf::Plan plan;
  const mlx_gguf::Format* format;
};

} // namespace MTL

namespace mlx::core::metal {

class Device;

class CommandEncoder {
 public:
  explicit CommandEncoder(Stream stream) : stream_(stream) {}

  void set_compute_pipeline_state(MTL::ComputePipelineState* kernel) {
    kernel_ = *kernel;
    buffers_ = {};
  }
  void set_input_array(const array& a, int index) {
    buffers_[index] = array::unsafe_weak_copy(a);
  }
  void set_output_array(array& a, int index) {
    set_input_array(a, index);
  }
  void set_bytes(const Params& params, int) {
    params_ = params;
  }
  void add_temporary(array a);
  void dispatch_threadgroups(MTL::Size grid, MTL::Size group);

 private:
  Stream stream_;
  MTL::ComputePipelineState kernel_{};
  Params params_{};
  std::array<std::optional<array>, 7> buffers_;
};

CommandEncoder& get_command_encoder(Stream s);

} // namespace mlx::core::metal
