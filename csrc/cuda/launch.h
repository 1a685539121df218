// From a plan to nodes: grids, shared memory and the arguments of each kernel.
#pragma once

#include "../../cuda/params.h"
#include "cuda/encode.h"

namespace mlx_gguf::cuda {

// What a product reads, in row order.
struct Operands {
  std::optional<array> w;
  std::optional<array> x;
  std::optional<array> c;
  std::optional<array> lhs;
  std::optional<array> rhs;
};

// y = `out` for every one of `batch` entries; w has so many matrices. Any plan
// but dense, which has dense_product().
void launch(
    const Plan& plan,
    const Format& format,
    const Params& p,
    const Operands& in,
    array& out,
    int64_t batch,
    int64_t matrices,
    mx::Stream s);

// p.M rows of w as numbers.
void launch_dequantize(
    const Format& format,
    const Params& p,
    const std::optional<array>& w,
    array& out,
    mx::Stream s);

// Kernel::dense for one matrix; gives out its data.
void dense_product(
    const Format& format,
    const Params& p,
    const Operands& in,
    bool transpose,
    array& out,
    mx::Stream s);

// Bytes whose only use is this stream's next nodes.
array scratch(int64_t nbytes);

// `a` in row order: itself nearly always, so that a node in the graph would
// cost more than this question (see ops.cpp).
array in_rows(const array& a, mx::Stream s);

// `a` at a multiple of `alignment` bytes: itself, or a copy.
array aligned(const array& a, uint64_t alignment, mx::Stream s);

} // namespace mlx_gguf::cuda
