#include "cuda/launch.h"

#include <map>
#include <tuple>

#include "gpu/batch.h"
#include "gpu/nodes.h"
#include "mlx/allocator.h"
#include "mlx/backend/cuda/utils.h"
#include "mlx/ops.h"

namespace mlx_gguf::cuda {

namespace {

unsigned blocks(int64_t a, int64_t b) {
  return static_cast<unsigned>(ceil_div(a, b));
}

CUtensorMap encode_map(
    const Plan& plan,
    void* w,
    int64_t row_bytes,
    int64_t N,
    int64_t matrices,
    int box_bytes) {
  // 8-byte numbers, as copies start at 16 bytes and a box has 256 at most.
  int64_t row = row_bytes * plan.interleave;
  cuuint64_t sizes[] = {
      static_cast<cuuint64_t>(row / 8),
      static_cast<cuuint64_t>(N / plan.interleave),
      static_cast<cuuint64_t>(matrices)};
  cuuint64_t strides[] = {
      static_cast<cuuint64_t>(row), static_cast<cuuint64_t>(row_bytes * N)};
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

// Describing a matrix costs as much as the rest of a launch, and it says no
// more than these numbers, whoever owns the memory: a token's are kept.
const CUtensorMap& tensor_map(
    const Plan& plan,
    void* w,
    int64_t row_bytes,
    int64_t N,
    int64_t matrices,
    int box_bytes) {
  constexpr size_t most = 8192;
  using Key = std::tuple<void*, int64_t, int64_t, int64_t, int, int>;
  thread_local std::map<Key, CUtensorMap> maps;
  Key key{w, row_bytes, N, matrices, plan.interleave, box_bytes};
  auto it = maps.find(key);
  if (it == maps.end()) {
    if (maps.size() >= most) {
      maps.clear();
    }
    CUtensorMap made = encode_map(plan, w, row_bytes, N, matrices, box_bytes);
    it = maps.emplace(key, made).first;
  }
  return it->second;
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
  p.columns = p.M * parts_of(t);
  p.inverse = blocks(int64_t{1} << 31, p.M);
  in.x = aligned(*in.x, 16, s);
  void *w = address(in.w), *x = address(in.x), *c = address(in.c);
  void *lhs = address(in.lhs), *rhs = address(in.rhs);
  void* y = mx::gpu_ptr<void>(out);
  CUfunction kernel = function(plan, format, t);
  auto z = static_cast<unsigned>(batch);
  auto add = [&](const Launch& l, void* weights) {
    enqueue(
        kernel,
        l,
        {&in.w, &in.x, &in.c, &in.lhs, &in.rhs},
        out,
        {weights, &x, &c, &y, &p, &lhs, &rhs},
        s);
  };
  if (plan.kernel == Kernel::gemv_block) {
    return add({{blocks(p.N, 4), z, 1}, {128, 1, 1}}, &w);
  }
  if (plan.kernel == Kernel::gemv) {
    GemvLaunch l = gemv_launch(plan, format, t, p.M, p.K, gpu());
    p.tiles = static_cast<uint32_t>(plan.groups);
    p.held = static_cast<uint32_t>(l.held);
    dim3 block(32 * plan.groups * plan.turns, 1, 1);
    return add(
        {{blocks(p.N, 16 * plan.groups), z, 1}, block, l.shared_bytes}, &w);
  }
  TmaLaunch l = tma_launch(plan, format, p.M, p.N, p.K, batch, gpu());
  p.rows = static_cast<uint32_t>(l.rows);
  p.split = static_cast<uint32_t>(l.split);
  p.ranks = static_cast<uint32_t>(plan.ranks);
  p.held = static_cast<uint32_t>(l.held);
  p.stages = static_cast<uint32_t>(plan.stages);
  CUtensorMap map =
      tensor_map(plan, w, format.row_bytes(p.K), p.N, matrices, l.box_bytes);
  dim3 grid(plan.cluster, static_cast<unsigned>(l.clusters), z);
  dim3 block(32, plan.groups, plan.turns);
  p.early = starts_early() && !p.gather; // which says what w is
  add({grid, block, l.shared_bytes, plan.cluster, p.early != 0}, &map);
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
  p.inverse = blocks(int64_t{1} << 31, rows);
  std::optional<array> held =
      temporary(scratch(batch * tiles * units * 64 * column_bytes(format)), s);
  void *w = address(in.w), *x = address(in.x), *c = address(in.c);
  void *lhs = address(in.lhs), *rhs = address(in.rhs);
  void *prepared = address(held), *y = mx::gpu_ptr<void>(out);
  auto z = static_cast<unsigned>(batch);
  enqueue(
      function(Plan{.kernel = Kernel::prepare}, format, t),
      {{blocks(units * tiles * rows, 8), z, 1}, {256, 1, 1}},
      {&in.x, &in.lhs},
      *held,
      {&x, &prepared, &p, &lhs},
      s);
  dim3 grid(blocks(p.N, 128), static_cast<unsigned>(tiles), z);
  enqueue(
      function(plan, format, t),
      {grid, {256, 1, 1}, gemm_shared_bytes(format)},
      {&in.w, &held, &in.c, &in.rhs},
      out,
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
  dim3 grid(
      blocks(out.shape(-1), 64), blocks(p.M, 64), static_cast<unsigned>(batch));
  enqueue(
      function(plan, format, out.dtype()),
      {grid, {256, 1, 1}},
      {&in.w, &in.x, &in.c, &in.lhs, &in.rhs},
      out,
      {&w, &x, &c, &y, &p, &lhs, &rhs},
      s);
}

} // namespace

array scratch(int64_t nbytes) {
  array out(
      {static_cast<int>(ceil_div(nbytes, 4096)), 4096}, mx::uint8, nullptr, {});
  out.set_data(mx::allocator::malloc(out.nbytes()));
  return out;
}

array in_rows(const array& a, mx::Stream s) {
  return a.size() == 0 || a.flags().row_contiguous
             ? a
             : temporary(evaluate(mx::contiguous(a, false, s)), s);
}

array aligned(const array& a, uint64_t alignment, mx::Stream s) {
  if (a.size() == 0 ||
      reinterpret_cast<uintptr_t>(mx::gpu_ptr<void>(a)) % alignment == 0) {
    return a;
  }
  // Twice negated or added to zero would change NaN's bits; a copy does not.
  return temporary(evaluate(mx::copy(a, s)), s);
}

void launch_dequantize(
    const Format& format,
    const Params& p,
    const std::optional<array>& w,
    array& out,
    mx::Stream s) {
  Params params = p;
  void *from = address(w), *y = mx::gpu_ptr<void>(out);
  enqueue(
      function(Plan{.kernel = Kernel::dequantize}, format, out.dtype()),
      {{blocks(ceil_div(p.K, 16) * p.M, 128), 1, 1}, {128, 1, 1}},
      {&w},
      out,
      {&from, &y, &params},
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

} // namespace mlx_gguf::cuda
