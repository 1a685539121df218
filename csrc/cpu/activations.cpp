#include "cpu/activations.h"

#include <algorithm>

#include "cpu/threads.h"

namespace mlx_gguf::cpu {

namespace {

int64_t round_up(int64_t n, int64_t to) {
  return (n + to - 1) / to * to;
}

// What fixed point may lose of a row, relative to its norm: of 16-bit floats at
// most 3e-5 of a result, and 1.3e-5 as a rule; of f32 2e-6, and 2e-7 as a rule.
float tolerance(Number number) {
  return number == Number::f32 ? 4e-7f : 2.1e-5f;
}

} // namespace

size_t item_size(Number number) {
  return number == Number::f32 ? 4 : 2;
}

Activations::Activations(
    const void* x,
    int64_t rows,
    int64_t width,
    Number number,
    const TypeKernels* fixed_for,
    bool alone)
    : stride_(round_up(width, x_padding)) {
  bool in_place = number == Number::f32 && stride_ == width;
  if (!in_place) {
    copy_.reset(new float[rows * stride_]);
  }
  data_ = in_place ? static_cast<const float*>(x) : copy_.get();
  const Isa& cpu = isa();
  if (fixed_for) {
    fixed_stride_ = round_up(cpu.fixed_bytes(width), 64);
    fixed_ = Buffer(rows * fixed_stride_);
    is_fixed_.reset(new bool[rows]);
  }
  auto prepare = [&](int64_t r) {
    if (!in_place) {
      float* row = copy_.get() + r * stride_;
      auto from = static_cast<const char*>(x) + r * width * item_size(number);
      cpu.to_f32(number, from, width, row);
      std::fill(row + width, row + stride_, 0.0f);
    }
    if (fixed_for) {
      is_fixed_[r] = cpu.fix(
          row(r),
          width,
          *fixed_for,
          tolerance(number),
          alone && fixed_for->planes,
          fixed_.get() + r * fixed_stride_);
    }
  };
  parallel_for(in_place && !fixed_for ? 0 : rows, prepare);
}

Packs::Packs(
    const std::vector<const void*>& rows, int64_t K, const TypeKernels& type) {
  const Isa& cpu = isa();
  int64_t size = static_cast<int64_t>(rows.size());
  int64_t count = round_up(size, pack_rows) / pack_rows;
  stride_ = round_up(cpu.packed_bytes(K), 64);
  data_ = Buffer(count * stride_);
  parallel_for(count, [&](int64_t i) {
    const void* some[pack_rows] = {};
    int64_t first = i * pack_rows;
    std::copy_n(&rows[first], std::min(pack_rows, size - first), some);
    cpu.pack(some, K, type, data_.get() + i * stride_);
  });
}

std::vector<const void*> Packs::list(int64_t first, int64_t count) const {
  std::vector<const void*> out;
  for (int64_t i = first; i < first + count; ++i) {
    out.push_back(data_.get() + i * stride_);
  }
  return out;
}

} // namespace mlx_gguf::cpu
