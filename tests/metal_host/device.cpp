// The stand-in's launches, and what csrc/metal/device.cpp gives with Metal.
#include "metal/device.h"

#include <map>
#include <stdexcept>
#include <vector>

#include "metal/eval.h"
#include "metal/names.h"
#include "mlx/backend/cpu/encoder.h"

namespace mlx::core::metal {

namespace {

using mlx_gguf::Kernel;

float number(const array& a, uint64_t i) {
  switch (a.dtype().val()) {
    case Dtype::Val::float16:
      return a.data<float16_t>()[i];
    case Dtype::Val::bfloat16:
      return a.data<bfloat16_t>()[i];
    default:
      return a.data<float>()[i];
  }
}

void set_number(array& a, uint64_t i, float value) {
  switch (a.dtype().val()) {
    case Dtype::Val::float16:
      a.data<float16_t>()[i] = value;
      break;
    case Dtype::Val::bfloat16:
      a.data<bfloat16_t>()[i] = value;
      break;
    default:
      a.data<float>()[i] = value;
  }
}

// f32 and q8_0: one type of plain numbers and one of blocks.
float weight(const uint8_t* row, const mlx_gguf::Format& format, uint32_t k) {
  if (format.plain) {
    float value;
    std::memcpy(&value, row + 4 * k, 4);
    return value;
  }
  const uint8_t* block = row + k / 32 * 34;
  float16_t scale;
  std::memcpy(&scale, block, 2);
  return float(scale) * static_cast<int8_t>(block[2 + k % 32]);
}

struct Launch {
  MTL::ComputePipelineState kernel;
  Params p;
  std::vector<array> buffers; // w, x, c, y, w again, lhs, rhs
  MTL::Size grid, group;

  void run() {
    const mlx_gguf::Plan& plan = kernel.plan;
    mlx_gguf::metal::Geometry g = mlx_gguf::metal::geometry(plan);
    if (static_cast<int>(group.width) != g.threads || group.height != 1) {
      throw std::logic_error("threads of a threadgroup");
    }
    bool dequantize = plan.kernel == Kernel::dequantize;
    bool experts = plan.kernel == Kernel::gather_gemm;
    bool by_k = dequantize || !plan.transpose;
    uint32_t columns = by_k ? p.K : p.N, depth = by_k ? p.N : p.K;
    const uint32_t* lhs = p.gather ? buffers[5].data<uint32_t>() : nullptr;
    const uint32_t* rhs = p.gather ? buffers[6].data<uint32_t>() : nullptr;
    uint64_t row_bytes = kernel.format->row_bytes(p.K);
    // Only what the grid covers is computed.
    for (uint64_t z = 0; z < grid.depth; ++z) {
      for (uint32_t m = 0; m < p.M && m / g.rows < grid.height; ++m) {
        uint64_t entry = experts ? m : z;
        uint64_t x = (lhs ? lhs[entry] : z) * p.x_step;
        uint64_t w = (rhs ? rhs[entry] : z) * p.w_step;
        x += experts ? 0 : uint64_t{m} * depth;
        for (uint32_t n = 0; n < columns && n / g.columns < grid.width; ++n) {
          const uint8_t* bytes = buffers[0].data<uint8_t>() + w;
          if (dequantize) {
            float value = weight(bytes + m * row_bytes, *kernel.format, n);
            set_number(buffers[3], uint64_t{m} * columns + n, value);
            continue;
          }
          double sum = 0;
          for (uint32_t i = 0; i < depth; ++i) {
            const uint8_t* row = bytes + (by_k ? i : n) * row_bytes;
            sum += double(number(buffers[1], x + i)) *
                   weight(row, *kernel.format, by_k ? n : i);
          }
          uint64_t at = uint64_t{m} * columns + n;
          float value = p.alpha * static_cast<float>(sum);
          if (p.has_c) {
            value += p.beta * number(buffers[2], z * p.c_step + at);
          }
          set_number(buffers[3], z * p.y_step + at, value);
        }
      }
    }
  }
};

} // namespace

void CommandEncoder::add_temporary(array a) {
  cpu::get_command_encoder(stream_).add_temporary(std::move(a));
}

void CommandEncoder::dispatch_threadgroups(MTL::Size grid, MTL::Size group) {
  Launch launch{kernel_, params_, {}, grid, group};
  for (size_t i = 0; i < buffers_.size(); ++i) {
    launch.buffers.push_back(i == 4 ? *buffers_[0] : buffers_[i].value());
  }
  cpu::get_command_encoder(stream_).dispatch(
      [launch = std::move(launch)]() mutable { launch.run(); });
}

CommandEncoder& get_command_encoder(Stream s) {
  thread_local std::map<int, CommandEncoder> encoders;
  return encoders.try_emplace(s.index, s).first->second;
}

} // namespace mlx::core::metal

namespace mlx_gguf::metal {

const Gpu& gpu() {
  static const Gpu m1;
  return m1;
}

MTL::ComputePipelineState* pipeline(
    const Plan& plan, const Format& format, mlx::core::Dtype x) {
  kernel_name(plan, format, x); // throws where there is no such kernel
  thread_local MTL::ComputePipelineState kernel;
  kernel = {plan, &format};
  return &kernel;
}

} // namespace mlx_gguf::metal
