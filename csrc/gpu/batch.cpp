#include "gpu/batch.h"

namespace mlx_gguf {

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

int64_t product(const mx::Shape& axes) {
  int64_t out = 1;
  for (int n : axes) {
    out *= n;
  }
  return out;
}

mx::Shape batch_axes(const array& a) {
  return a.ndim() < 2 ? mx::Shape{}
                      : mx::Shape(a.shape().begin(), a.shape().end() - 2);
}

array entries(const mx::Shape& from, const mx::Shape& to) {
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
  return array(out.data(), {static_cast<int>(out.size())}, mx::uint32);
}

} // namespace mlx_gguf
