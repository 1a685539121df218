// Products of many rows: the weights written out in x's dtype, then MLX's own
// matmul.
#include <unordered_map>

#include "cuda/launch.h"
#include "gpu/nodes.h"
#include "mlx/backend/cuda/device.h"

namespace mlx_gguf::cuda {

namespace {

// [N, K] in `dtype`, in memory that all products of a stream take in turns: a
// host that runs ahead of the device would else hold the weights of many layers
// at once. A stream belongs to a thread.
array weights_of(int N, int K, mx::Dtype dtype, mx::Stream s) {
  thread_local std::unordered_map<int, array> kept;
  array out({N, K}, dtype, nullptr, {});
  auto it = kept.find(s.index);
  if (it == kept.end() || it->second.nbytes() < out.nbytes()) {
    it = kept.insert_or_assign(s.index, scratch(out.nbytes())).first;
  }
  temporary(it->second, s);
  out.copy_shared_buffer(
      it->second,
      out.strides(),
      {.contiguous = true, .row_contiguous = true, .col_contiguous = false},
      out.size());
  return out;
}

} // namespace

void dense_product(
    const Format& format,
    const Params& p,
    const Operands& in,
    bool transpose,
    array& out,
    mx::Stream s) {
  int N = static_cast<int>(p.N), K = static_cast<int>(p.K);
  array weights = weights_of(N, K, out.dtype(), s);
  Params rows = p;
  rows.M = p.N;
  launch_dequantize(format, rows, in.w, weights, s);
  dense_matmul(*in.x, weights, transpose, in.c, out, p.alpha, p.beta, s);
  // MLX orders nodes after the last one that wrote what they touch, not after
  // those that read it. The next node, whatever it is, waits for this product
  // and passes for a writer of the weights, so that their next writer waits,
  // too.
  auto& encoder = mx::cu::get_command_encoder(s);
  encoder.set_input_array(out);
  encoder.set_output_array(weights);
}

} // namespace mlx_gguf::cuda
