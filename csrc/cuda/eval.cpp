// The operations on CUDA: shapes, a plan, a launch. The work is enqueued on the
// stream.
#include <algorithm>

#include "cuda/ahead.h"
#include "cuda/backend.h"
#include "cuda/launch.h"
#include "gpu/batch.h"
#include "gpu/nodes.h"
#include "mlx/allocator.h"
#include "mlx/backend/common/utils.h"
#include "mlx/backend/cuda/utils.h"

namespace mlx_gguf::cuda {

namespace {

bool copies_take(const array& w) {
  return w.size() > 0 &&
         reinterpret_cast<uintptr_t>(mx::gpu_ptr<void>(w)) % 16 == 0;
}

// Blocks at addresses their type aligns them to.
array as_blocks(const array& w, const Format& format, mx::Stream s) {
  return aligned(w, format.packed() ? format.alignment : 4, s);
}

std::optional<array> kept(std::optional<array> a, mx::Stream s) {
  return a ? std::optional(temporary(*a, s)) : a;
}

// c in the shape of the output.
array addend(const array& c, const array& out, mx::Stream s) {
  return c.size() == out.size() ? in_rows(c, s) : expanded(c, out.shape(), s);
}

void quantized_matmul(
    const std::vector<array>& inputs,
    array& out,
    const MatmulState& state,
    mx::Stream s) {
  if (out.size() == 0) {
    out.set_data(mx::allocator::malloc(0));
    return;
  }
  const Format& format = *state.format;
  Operands in{as_blocks(inputs[1], format, s), in_rows(inputs[0], s)};
  auto p = params_of<Params>(*in.w, format);
  p.last_w = UINT32_MAX;
  Batch batch = batch_of(*in.x, *in.w, out, p);
  int64_t matrices = product(batch_axes(*in.w));
  if (p.gather) {
    p.last_x = static_cast<uint32_t>(product(batch_axes(*in.x)) - 1);
    p.last_w = static_cast<uint32_t>(matrices - 1);
  } else if (p.w_step == 0) {
    p.last_w = 0;
  }
  p.alpha = state.alpha;
  p.beta = state.beta;
  p.y_step = p.c_step = uint64_t{p.M} * out.shape(-1);
  // Sums over nothing are zero, which every kernel gets right.
  int64_t N = std::max(p.N, 1u), K = std::max(p.K, 1u);
  Plan plan = choose(
      format,
      in.x->dtype(),
      p.M,
      N,
      K,
      batch.size,
      state.transpose,
      copies_take(*in.w),
      gpu());
  bool dense = plan.kernel == Kernel::dense;
  if (inputs.size() == 3) {
    in.c = dense ? in_rows(inputs[2], s) : addend(inputs[2], out, s);
    p.has_c = 1;
  }
  if (dense) {
    return dense_product(format, p, in, plan.transpose, out, s);
  }
  out.set_data(mx::allocator::malloc(out.nbytes()));
  in.lhs = kept(batch.lhs, s);
  in.rhs = kept(batch.rhs, s);
  launch(plan, format, p, in, out, batch.size, matrices, s);
}

void gather_qmm(
    const std::vector<array>& inputs,
    array& out,
    const Format& format,
    bool transpose,
    bool sorted,
    mx::Stream s) {
  out.set_data(mx::allocator::malloc(out.nbytes()));
  if (out.size() == 0) {
    return;
  }
  Operands in{
      as_blocks(inputs[1], format, s),
      in_rows(inputs[0], s),
      {},
      in_rows(inputs[2], s),
      in_rows(inputs[3], s)};
  auto p = params_of<Params>(*in.w, format);
  int64_t M = out.shape(-2);
  int64_t pairs = static_cast<int64_t>(inputs[2].size());
  int64_t experts = in.w->shape(0), many = product(batch_axes(*in.x));
  p.last_x = static_cast<uint32_t>(many - 1);
  p.last_w = static_cast<uint32_t>(experts - 1);
  p.x_step = static_cast<uint64_t>(M) * in.x->shape(-1);
  p.y_step = static_cast<uint64_t>(M) * out.shape(-1);
  int64_t N = std::max(p.N, 1u), K = std::max(p.K, 1u);
  if (experts == 0 || many == 0) {
    throw std::runtime_error(
        std::string("[gather_qmm] Expected ") + (experts == 0 ? "rhs" : "lhs") +
        "_indices below 0. Received some.");
  }
  Plan plan = choose_gather(
      format,
      in.x->dtype(),
      M,
      N,
      K,
      pairs,
      experts,
      sorted,
      transpose,
      copies_take(*in.w),
      gpu());
  // The rows of all pairs are one product there.
  bool one = plan.kernel == Kernel::gather_gemm ||
             plan.kernel == Kernel::gather_gemm_block;
  p.M = static_cast<uint32_t>(one ? pairs : M);
  p.gather = one ? 2 : 1;
  launch(plan, format, p, in, out, one ? 1 : pairs, experts, s);
}

void dequantize(
    const array& packed, array& out, const Format& format, mx::Stream s) {
  out.set_data(mx::allocator::malloc(out.nbytes()));
  if (out.size() == 0) {
    return;
  }
  Params p{};
  p.K = out.shape(-1);
  p.M = static_cast<uint32_t>(out.size() / p.K);
  launch_dequantize(format, p, as_blocks(packed, format, s), out, s);
}

void upload(array& to, const void* from, size_t nbytes) {
  mx::cu::device(mx::Device(mx::Device::gpu)).make_current();
  check(
      cuMemcpyHtoD(
          reinterpret_cast<CUdeviceptr>(mx::gpu_ptr<void>(to)), from, nbytes),
      "copy to the device");
}

void upload_output(array& out, const void* from, mx::Stream s) {
  auto [_, row, col] = mx::check_contiguity(out.shape(), out.strides());
  out.copy_shared_buffer(
      device_memory(static_cast<int64_t>(out.nbytes()), s),
      out.strides(),
      {.contiguous = true, .row_contiguous = row, .col_contiguous = col},
      out.size());
  // Nodes may have used this memory before.
  mx::cu::get_command_encoder(s).synchronize();
  upload(out, from, out.nbytes());
}

} // namespace

} // namespace mlx_gguf::cuda

extern "C" __attribute__((visibility("default"))) const mlx_gguf::cuda::Backend*
mlx_gguf_cuda_backend() {
  using namespace mlx_gguf::cuda;
  static const Backend backend{
      quantized_matmul,
      gather_qmm,
      dequantize,
      step,
      gated_delta,
      upload,
      upload_output,
      compile_ahead,
      describe};
  return &backend;
}
