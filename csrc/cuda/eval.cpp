// The operations on CUDA: a plan, a kernel, a node in MLX's graph. Every input
// is row-contiguous (see ops.cpp); the work is enqueued on the stream.
#include <algorithm>
#include <cstring>
#include <map>

#include "../../cuda/params.h"
#include "cuda/backend.h"
#include "cuda/module.h"
#include "mlx/allocator.h"
#include "mlx/backend/cuda/utils.h"
#include "mlx/ops.h"

namespace mlx_gguf::cuda {

namespace {

struct Operands {
  array w;
  std::optional<array> x;
  std::optional<array> c;
  std::optional<array> lhs;
  std::optional<array> rhs;
};

uint32_t ceil_div(int64_t a, int64_t b) {
  return static_cast<uint32_t>((a + b - 1) / b);
}

void* address(const std::optional<array>& a) {
  // An empty array has no buffer.
  return a && a->size() > 0 ? mx::gpu_ptr<void>(*a) : nullptr;
}

// MLX exports graph nodes, not their kernels. A node whose inputs have their
// data can be evaluated on the spot, as the scheduler would.
array evaluate(array node, mx::Stream s) {
  std::vector<array> outputs{node};
  node.primitive().eval_gpu(node.inputs(), outputs);
  mx::cu::get_command_encoder(s).add_temporary(node);
  return node;
}

// `a` over `shape`, which it broadcasts to, in row order.
array expanded(const array& a, const mx::Shape& shape, mx::Stream s) {
  array view(shape, a.dtype(), nullptr, {});
  mx::Strides strides(shape.size(), 0);
  size_t shift = shape.size() - a.ndim();
  for (size_t i = 0; i < a.ndim(); ++i) {
    strides[shift + i] = a.shape(i) == 1 ? 0 : a.strides()[i];
  }
  view.copy_shared_buffer(
      a,
      strides,
      {.contiguous = false, .row_contiguous = false, .col_contiguous = false},
      a.data_size());
  return evaluate(mx::contiguous(view, false, s), s);
}

// `a` at a multiple of `alignment` bytes: itself, or a copy.
array aligned(const array& a, uint64_t alignment, mx::Stream s) {
  if (a.size() == 0 ||
      reinterpret_cast<uintptr_t>(mx::gpu_ptr<void>(a)) % alignment == 0) {
    return a;
  }
  // Twice negated or added to zero would change NaN's bits; a copy does not.
  return evaluate(mx::copy(a, s), s);
}

array scratch(int64_t nbytes, mx::Stream s) {
  array out(
      {static_cast<int>(ceil_div(nbytes, 4096)), 4096}, mx::uint8, nullptr, {});
  out.set_data(mx::allocator::malloc(out.nbytes()));
  mx::cu::get_command_encoder(s).add_temporary(out);
  return out;
}

// MLX keeps executable graphs and gives a graph of the same shape to one of
// them, which cannot change the clusters of a kernel. It tells graphs with a
// child apart by the child's clusters, so a kernel with clusters is a child.
void add_cluster_node(
    mx::cu::CommandEncoder& encoder,
    CUfunction kernel,
    dim3 grid,
    dim3 block,
    int cluster,
    uint32_t shared_bytes,
    std::vector<void*>& arguments) {
  CUDA_KERNEL_NODE_PARAMS params{};
  params.func = kernel;
  params.gridDimX = grid.x;
  params.gridDimY = grid.y;
  params.gridDimZ = grid.z;
  params.blockDimX = block.x;
  params.blockDimY = block.y;
  params.blockDimZ = block.z;
  params.sharedMemBytes = shared_bytes;
  params.kernelParams = arguments.data();
  // One graph for a thread and size: only its parameters change, and MLX clones
  // it.
  struct Child {
    CUgraph graph = nullptr;
    CUgraphNode node = nullptr;
  };
  thread_local std::map<int, Child> children;
  Child& child = children[cluster];
  if (child.graph) {
    check(cuGraphKernelNodeSetParams(child.node, &params), "change a kernel");
  } else {
    check(cuGraphCreate(&child.graph, 0), "create a graph");
    check(
        cuGraphAddKernelNode(&child.node, child.graph, nullptr, 0, &params),
        "add a kernel");
    CUlaunchAttributeValue value{};
    value.clusterDim.x = static_cast<unsigned>(cluster);
    value.clusterDim.y = value.clusterDim.z = 1;
    check(
        cuGraphKernelNodeSetAttribute(
            child.node, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, &value),
        "set a kernel's clusters");
  }
  encoder.add_graph_node(
      child.graph, "(K" + std::to_string(cluster) + ")", true);
}

void enqueue(
    const Plan& plan,
    const Format& format,
    mx::Dtype x,
    const std::vector<const std::optional<array>*>& inputs,
    array& out,
    dim3 grid,
    dim3 block,
    int64_t shared_bytes,
    std::vector<void*> arguments,
    mx::Stream s,
    int cluster = 1) {
  CUfunction kernel = function(plan, format, x);
  auto& encoder = mx::cu::get_command_encoder(s);
  for (const std::optional<array>* a : inputs) {
    if (*a && (*a)->size() > 0) {
      encoder.set_input_array(**a);
    }
  }
  encoder.set_output_array(out);
  auto bytes = static_cast<uint32_t>(shared_bytes);
  if (cluster == 1) {
    encoder.add_kernel_node_raw(
        kernel, grid, block, dim3(0, 0, 0), bytes, arguments.data());
  } else {
    add_cluster_node(encoder, kernel, grid, block, cluster, bytes, arguments);
  }
}

CUtensorMap tensor_map(
    const Plan& plan,
    const Format& format,
    void* w,
    int64_t N,
    int64_t K,
    int64_t matrices,
    int box_bytes) {
  // 8-byte numbers, as copies start at 16 bytes and a box has 256 at most.
  int64_t row = format.row_bytes(K) * plan.interleave;
  cuuint64_t sizes[] = {
      static_cast<cuuint64_t>(row / 8),
      static_cast<cuuint64_t>(N / plan.interleave),
      static_cast<cuuint64_t>(matrices)};
  cuuint64_t strides[] = {
      static_cast<cuuint64_t>(row),
      static_cast<cuuint64_t>(format.row_bytes(K) * N)};
  cuuint32_t box[] = {
      static_cast<cuuint32_t>(box_bytes / 8),
      static_cast<cuuint32_t>(plan.interleave == 1 ? 16 : 8 / plan.interleave),
      1};
  cuuint32_t steps[] = {1, 1, 1};
  CUtensorMap out;
  check(
      cuTensorMapEncodeTiled(
          &out,
          CU_TENSOR_MAP_DATA_TYPE_UINT64,
          3,
          w,
          sizes,
          strides,
          box,
          steps,
          CU_TENSOR_MAP_INTERLEAVE_NONE,
          CU_TENSOR_MAP_SWIZZLE_NONE,
          CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
      "describe a matrix to the copy engine");
  return out;
}

void launch_gemv(
    const Plan& plan,
    const Format& format,
    Params p,
    Operands in,
    array& out,
    int64_t batch,
    int64_t matrices,
    mx::Stream s) {
  mx::Dtype t = out.dtype();
  int parts = parts_of(t);
  p.columns = p.M * parts;
  p.inverse = ceil_div(int64_t{1} << 31, p.M);
  in.x = aligned(*in.x, 16, s);
  void *w = address(in.w), *x = address(in.x), *c = address(in.c);
  void *lhs = address(in.lhs), *rhs = address(in.rhs);
  void* y = mx::gpu_ptr<void>(out);
  std::optional<array> w_input = in.w;
  std::vector<const std::optional<array>*> inputs{
      &w_input, &in.x, &in.c, &in.lhs, &in.rhs};
  auto z = static_cast<unsigned>(batch);
  if (plan.kernel == Kernel::gemv_tma) {
    TmaLaunch l = tma_launch(plan, format, p.M, p.N, p.K, batch, gpu());
    p.rows = static_cast<uint32_t>(l.rows);
    p.split = static_cast<uint32_t>(l.split);
    p.held = static_cast<uint32_t>(l.held);
    p.stages = static_cast<uint32_t>(plan.stages);
    CUtensorMap map =
        tensor_map(plan, format, w, p.N, p.K, matrices, l.box_bytes);
    auto clusters = static_cast<unsigned>(l.clusters);
    auto cluster = static_cast<unsigned>(plan.cluster);
    dim3 block(32, plan.groups, plan.turns);
    enqueue(
        plan,
        format,
        t,
        inputs,
        out,
        dim3(cluster, clusters, z),
        block,
        l.shared_bytes,
        {&map, &x, &c, &y, &p, &lhs, &rhs},
        s,
        plan.cluster);
    return;
  }
  std::vector<void*> arguments{&w, &x, &c, &y, &p, &lhs, &rhs};
  if (plan.kernel == Kernel::gemv_block) {
    dim3 grid(ceil_div(p.N, 4), z, 1);
    enqueue(
        plan, format, t, inputs, out, grid, dim3(128, 1, 1), 0, arguments, s);
    return;
  }
  GemvLaunch l = gemv_launch(plan, format, t, p.M, p.K, gpu());
  p.tiles = static_cast<uint32_t>(plan.groups);
  p.held = static_cast<uint32_t>(l.held);
  dim3 grid(ceil_div(p.N, 16 * plan.groups), z, 1);
  dim3 block(32 * plan.groups * plan.turns, 1, 1);
  enqueue(
      plan, format, t, inputs, out, grid, block, l.shared_bytes, arguments, s);
}

// gemm and gather_gemm; p.M rows of x in every one of `batch` entries.
void launch_gemm(
    const Plan& plan,
    const Format& format,
    Params p,
    Operands in,
    array& out,
    int64_t batch,
    mx::Stream s) {
  mx::Dtype t = out.dtype();
  in.x = aligned(*in.x, 16, s);
  int64_t rows = gemm_rows(t);
  int64_t tiles = ceil_div(p.M, rows), units = ceil_div(p.K, 256);
  p.inverse = ceil_div(int64_t{1} << 31, rows);
  std::optional<array> held =
      scratch(batch * tiles * units * 64 * column_bytes(format), s);
  void *w = address(in.w), *x = address(in.x), *c = address(in.c);
  void *lhs = address(in.lhs), *rhs = address(in.rhs);
  void *prepared = address(held), *y = mx::gpu_ptr<void>(out);
  auto z = static_cast<unsigned>(batch);
  enqueue(
      Plan{.kernel = Kernel::prepare},
      format,
      t,
      {&in.x, &in.lhs},
      *held,
      dim3(ceil_div(units * tiles * rows, 8), z, 1),
      dim3(256, 1, 1),
      0,
      {&x, &prepared, &p, &lhs},
      s);
  std::optional<array> w_input = in.w;
  enqueue(
      plan,
      format,
      t,
      {&w_input, &held, &in.c, &in.rhs},
      out,
      dim3(ceil_div(p.N, 128), static_cast<unsigned>(tiles), z),
      dim3(256, 1, 1),
      gemm_shared_bytes(format),
      {&w, &prepared, &c, &y, &p, &rhs},
      s);
}

void launch_gemm_block(
    const Plan& plan,
    const Format& format,
    Params p,
    const Operands& in,
    array& out,
    int64_t batch,
    mx::Stream s) {
  void *w = address(in.w), *x = address(in.x), *c = address(in.c);
  void *lhs = address(in.lhs), *rhs = address(in.rhs);
  void* y = mx::gpu_ptr<void>(out);
  std::optional<array> w_input = in.w;
  enqueue(
      plan,
      format,
      out.dtype(),
      {&w_input, &in.x, &in.c, &in.lhs, &in.rhs},
      out,
      dim3(
          ceil_div(out.shape(-1), 64),
          ceil_div(p.M, 64),
          static_cast<unsigned>(batch)),
      dim3(256, 1, 1),
      0,
      {&w, &x, &c, &y, &p, &lhs, &rhs},
      s);
}

void launch(
    const Plan& plan,
    const Format& format,
    const Params& p,
    const Operands& in,
    array& out,
    int64_t batch,
    int64_t matrices,
    mx::Stream s) {
  switch (plan.kernel) {
    case Kernel::gemv_tma:
    case Kernel::gemv:
    case Kernel::gemv_block:
      return launch_gemv(plan, format, p, in, out, batch, matrices, s);
    case Kernel::gemm:
    case Kernel::gather_gemm:
      return launch_gemm(plan, format, p, in, out, batch, s);
    default:
      return launch_gemm_block(plan, format, p, in, out, batch, s);
  }
}

Params params_of(const array& w, const Format& format) {
  Params p{};
  p.N = w.shape(-2);
  p.K = static_cast<uint32_t>(
      w.shape(-1) / format.block_bytes * int64_t{format.block_size});
  p.alpha = p.beta = 1.0f;
  p.w_step = uint64_t{p.N} * static_cast<uint64_t>(w.shape(-1));
  return p;
}

int64_t product(const mx::Shape& axes) {
  int64_t out = 1;
  for (int n : axes) {
    out *= n;
  }
  return out;
}

// The batch axes of an array: all but the last two, or none.
mx::Shape batch_axes(const array& a) {
  return a.ndim() < 2 ? mx::Shape{}
                      : mx::Shape(a.shape().begin(), a.shape().end() - 2);
}

// For every entry of batch axes `to`, in row order, which entry of the axes
// `from` broadcasts to it.
array entries(const mx::Shape& from, const mx::Shape& to, mx::Stream s) {
  std::vector<uint32_t> out{0};
  size_t shift = to.size() - from.size();
  for (size_t i = 0; i < to.size(); ++i) {
    bool repeats = i < shift || from[i - shift] == 1;
    uint32_t n = to[i];
    std::vector<uint32_t> next;
    next.reserve(out.size() * n);
    for (uint32_t entry : out) {
      for (uint32_t j = 0; j < n; ++j) {
        next.push_back(repeats ? entry : entry * n + j);
      }
    }
    out = std::move(next);
  }
  array made(out.data(), {static_cast<int>(out.size())}, mx::uint32);
  mx::cu::get_command_encoder(s).add_temporary(made);
  return made;
}

// How the matrices of x and w meet in the output; sets M, gather and the steps.
struct Batch {
  int64_t size = 1;
  std::optional<array> lhs;
  std::optional<array> rhs;
};

Batch batch_of(
    const array& x, const array& w, const array& out, Params& p, mx::Stream s) {
  int64_t rows = static_cast<int64_t>(out.size()) / out.shape(-1);
  mx::Shape w_axes = batch_axes(w);
  int64_t w_count = product(w_axes);
  if (w_count == 1) { // all rows of x are rows of one product
    p.M = static_cast<uint32_t>(rows);
    p.w_step = 0;
    p.last_w = 0;
    return {};
  }
  p.M = out.shape(-2);
  p.last_w = UINT32_MAX;
  Batch batch;
  batch.size = rows / p.M;
  mx::Shape x_axes = batch_axes(x);
  int64_t x_count = product(x_axes);
  p.x_step = uint64_t{p.M} * x.shape(-1);
  if ((x_count == 1 || x_count == batch.size) && w_count == batch.size) {
    p.x_step = x_count == 1 ? 0 : p.x_step;
    return batch;
  }
  mx::Shape axes = batch_axes(out);
  p.gather = 1;
  p.last_x = static_cast<uint32_t>(x_count - 1);
  p.last_w = static_cast<uint32_t>(w_count - 1);
  batch.lhs = entries(x_axes, axes, s);
  batch.rhs = entries(w_axes, axes, s);
  return batch;
}

bool copies_take(const array& w) {
  return w.size() > 0 &&
         reinterpret_cast<uintptr_t>(mx::gpu_ptr<void>(w)) % 16 == 0;
}

// Blocks at addresses their type aligns them to.
array as_blocks(const array& w, const Format& format, mx::Stream s) {
  return aligned(w, format.packed() ? format.alignment : 4, s);
}

void quantized_matmul(
    const std::vector<array>& inputs,
    array& out,
    const MatmulState& state,
    mx::Stream s) {
  out.set_data(mx::allocator::malloc(out.nbytes()));
  if (out.size() == 0) {
    return;
  }
  const Format& format = *state.format;
  Operands in{as_blocks(inputs[1], format, s), inputs[0], {}, {}, {}};
  Params p = params_of(in.w, format);
  Batch batch = batch_of(*in.x, in.w, out, p, s);
  p.alpha = state.alpha;
  p.beta = state.beta;
  p.y_step = p.c_step = uint64_t{p.M} * out.shape(-1);
  if (inputs.size() == 3) {
    in.c = inputs[2].size() == out.size() ? inputs[2]
                                          : expanded(inputs[2], out.shape(), s);
    p.has_c = 1;
  }
  in.lhs = batch.lhs;
  in.rhs = batch.rhs;
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
      copies_take(in.w),
      gpu());
  int64_t matrices = product(batch_axes(in.w));
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
      as_blocks(inputs[1], format, s), inputs[0], {}, inputs[2], inputs[3]};
  Params p = params_of(in.w, format);
  int64_t M = out.shape(-2);
  int64_t pairs = static_cast<int64_t>(inputs[2].size());
  p.gather = 1;
  p.last_x = static_cast<uint32_t>(product(batch_axes(*in.x)) - 1);
  p.last_w = static_cast<uint32_t>(in.w.shape(0) - 1);
  p.x_step = static_cast<uint64_t>(M) * in.x->shape(-1);
  p.y_step = static_cast<uint64_t>(M) * out.shape(-1);
  int64_t N = std::max(p.N, 1u), K = std::max(p.K, 1u);
  int64_t experts = in.w.shape(0);
  if (experts == 0 || product(batch_axes(*in.x)) == 0) {
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
      copies_take(in.w),
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
  std::optional<array> w = as_blocks(packed, format, s);
  Params p{};
  p.K = out.shape(-1);
  p.M = static_cast<uint32_t>(out.size() / p.K);
  void *from = address(w), *y = mx::gpu_ptr<void>(out);
  enqueue(
      Plan{.kernel = Kernel::dequantize},
      format,
      out.dtype(),
      {&w},
      out,
      dim3(ceil_div(int64_t{ceil_div(p.K, 16)} * p.M, 128), 1, 1),
      dim3(128, 1, 1),
      0,
      {&from, &y, &p},
      s);
}

void upload(array& to, const void* from, size_t nbytes) {
  mx::cu::device(mx::Device(mx::Device::gpu)).make_current();
  check(
      cuMemcpyHtoD(
          reinterpret_cast<CUdeviceptr>(mx::gpu_ptr<void>(to)), from, nbytes),
      "copy to the device");
}

} // namespace

} // namespace mlx_gguf::cuda

extern "C" __attribute__((visibility("default"))) const mlx_gguf::cuda::Backend*
mlx_gguf_cuda_backend() {
  using namespace mlx_gguf::cuda;
  static const Backend backend{
      quantized_matmul, gather_qmm, dequantize, upload};
  return &backend;
}
