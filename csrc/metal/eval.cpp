#include "metal/eval.h"

#include <algorithm>

#include "../../metal/params.h"
#include "gpu/batch.h"
#include "gpu/nodes.h"
#include "metal/device.h"
#include "metal/names.h"
#include "mlx/allocator.h"
#include "mlx/backend/metal/metal.h"
#include "tuned.h"

namespace mlx_gguf {

// The encoder stops tracking the buffers of its temporaries, so that only new
// ones may become temporaries: never an input's, nor what the output shares.
array temporary(array a, mx::Stream s) {
  mx::metal::get_command_encoder(s).add_temporary(a);
  return a;
}

} // namespace mlx_gguf

namespace mlx_gguf::metal {

namespace {

// What a launch reads; the order is that of the buffers in metal/common.h.
struct Operands {
  const array& w;
  const array* x = nullptr;
  const array* c = nullptr;
  const array* lhs = nullptr;
  const array* rhs = nullptr;
};

// From this many weights on a matrix in f32 (256 MB) costs too much memory:
// MLX may have several command buffers, each with one, in flight.
constexpr int64_t most_dense_weights = int64_t{1} << 26;

void launch(
    const Plan& plan,
    const Format& format,
    const Params& p,
    const Operands& in,
    array& out,
    int64_t batch,
    mx::Stream s) {
  auto& encoder = mx::metal::get_command_encoder(s);
  encoder.set_compute_pipeline_state(pipeline(plan, format, out.dtype()));
  // A kernel reads no buffer it has no use for, but Metal's validation wants
  // all of them bound. An empty array has no buffer.
  auto bind = [&](const array* a, int index) {
    encoder.set_input_array(a && a->size() > 0 ? *a : out, index);
  };
  bind(&in.w, 0);
  bind(in.x, 1);
  bind(in.c, 2);
  encoder.set_output_array(out, 3);
  encoder.set_bytes(p, 4);
  bind(in.lhs, 5);
  bind(in.rhs, 6);
  Geometry g = geometry(plan);
  int64_t columns = out.shape(-1);
  encoder.dispatch_threadgroups(
      MTL::Size(ceil_div(columns, g.columns), ceil_div(p.M, g.rows), batch),
      MTL::Size(g.threads, 1, 1));
}

// The weights of one matrix as f32 numbers, [N, K]: a temporary of s.
array dense_weights(
    const array& w, const Format& format, Params p, mx::Stream s) {
  array out(
      {static_cast<int>(p.N), static_cast<int>(p.K)}, mx::float32, nullptr, {});
  out.set_data(mx::allocator::malloc(out.nbytes()));
  p.M = p.N;
  launch(Plan{.kernel = Kernel::dequantize}, format, p, {w}, out, 1, s);
  return temporary(out, s);
}

} // namespace

bool is_available() {
  return mx::metal::is_available();
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
  const array& x = inputs[0];
  const array& w = inputs[1];
  const Format& format = *state.format;
  std::optional<array> c;
  if (inputs.size() == 3) {
    c = inputs[2];
  }
  auto p = params_of<Params>(w, format);
  Batch batch = batch_of(x, w, out, p);
  // Sums over nothing are zero, which every kernel gets right.
  int64_t N = std::max(p.N, 1u), K = std::max(p.K, 1u);
  mx::Dtype t = x.dtype();
  Plan plan = tuned_or(
      choose(format, t, batch.M, N, K, state.transpose, gpu()),
      Backend::metal,
      format,
      t,
      batch.M,
      N,
      K);
  if (plan.kernel == Kernel::matmul) {
    if (batch.size == 1 && N * K <= most_dense_weights && x.size() > 0) {
      array weights = dense_weights(w, format, p, s);
      return dense_matmul(
          x, weights, state.transpose, c, out, state.alpha, state.beta, s);
    }
    // The tile that choose() takes for so many rows.
    plan = Plan{
        .kernel = Kernel::gemm,
        .tile_m = 64,
        .tile_n = 64,
        .transpose = state.transpose};
  }

  out.set_data(mx::allocator::malloc(out.nbytes()));
  p.alpha = state.alpha;
  p.beta = state.beta;
  p.y_step = static_cast<uint64_t>(batch.M) * out.shape(-1);
  p.c_step = p.y_step;
  p.has_c = c ? 1 : 0;
  if (c && c->size() != out.size()) {
    c = expanded(*c, out.shape(), s);
  }
  if (batch.lhs) {
    temporary(*batch.lhs, s);
    temporary(*batch.rhs, s);
  }
  auto pointer = [](const std::optional<array>& a) {
    return a ? &*a : nullptr;
  };
  Operands operands{w, &x, pointer(c), pointer(batch.lhs), pointer(batch.rhs)};
  launch(plan, format, p, operands, out, batch.size, s);
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
  const array& x = inputs[0];
  const array& w = inputs[1];
  auto p = params_of<Params>(w, format);
  int64_t M = out.shape(-2);
  int64_t pairs = static_cast<int64_t>(inputs[2].size());
  p.gather = 1;
  p.x_step = static_cast<uint64_t>(M) * x.shape(-1);
  p.y_step = static_cast<uint64_t>(M) * out.shape(-1);
  int64_t N = std::max(p.N, 1u), K = std::max(p.K, 1u);
  mx::Dtype t = x.dtype();
  Plan plan = tuned_or(
      choose_gather(
          format, t, M, N, K, pairs, w.shape(0), sorted, transpose, gpu()),
      Backend::metal,
      format,
      t,
      M,
      N,
      K);
  // The rows of all pairs are one product there.
  bool one = plan.kernel == Kernel::gather_gemm;
  p.M = static_cast<uint32_t>(one ? pairs : M);
  Operands operands{w, &x, nullptr, &inputs[2], &inputs[3]};
  launch(plan, format, p, operands, out, one ? 1 : pairs, s);
}

void dequantize(
    const array& w, array& out, const Format& format, mx::Stream s) {
  out.set_data(mx::allocator::malloc(out.nbytes()));
  if (out.size() == 0) {
    return;
  }
  Params p{};
  p.K = out.shape(-1);
  p.M = static_cast<uint32_t>(out.size() / p.K);
  launch(Plan{.kernel = Kernel::dequantize}, format, p, {w}, out, 1, s);
}

} // namespace mlx_gguf::metal
