#include <memory>
#include <vector>

#include "cpu/fast.h"
#include "cpu/fast_task.h"
#include "mlx/ops.h"

namespace mlx_gguf::cpu {

using Arrays = std::vector<array>;

std::optional<array> gate(const array& x, bool gelu, mx::StreamOrDevice s) {
  auto stream = our_stream(s);
  if (!stream || !is_number(x.dtype()) || x.ndim() == 0) {
    return std::nullopt;
  }
  return array(
      x.shape(), x.dtype(), std::make_shared<Gate>(*stream, gelu), Arrays{x});
}

void Gate::eval_cpu(const Arrays& inputs, array& out) {
  out.set_data(mx::allocator::malloc(out.nbytes()));
  if (out.size() == 0) {
    return;
  }
  auto work = [x = View(inputs[0]), gelu = gelu_, to = Target(out)] {
    int64_t n = x.shape.back(), rows = 1;
    for (size_t axis = 0; axis + 1 < x.shape.size(); ++axis) {
      rows *= x.shape[axis];
    }
    for_parts(rows, n, [&](int64_t first, int64_t last) {
      Buffer scratch(2 * n * sizeof(float));
      for (int64_t r = first; r < last; ++r) {
        const float* in = x.floats(x.row(r), floats_of(scratch));
        float* y = to.floats(r * n, floats_of(scratch) + n);
        isa().fast.gate(in, gelu, n, y);
        to.write(y, r * n, n);
      }
    });
  };
  enqueue(inputs, out, stream(), std::move(work));
}

array Gate::spelled_out(const Arrays& inputs) {
  const array& x = inputs[0];
  auto s = stream();
  auto number = [&](double value) { return array(value, x.dtype()); };
  array z = x;
  if (gelu_) {
    array cube = mx::multiply(mx::multiply(x, x, s), x, s);
    cube = mx::multiply(number(0.044715), cube, s);
    z = mx::multiply(number(1.5957691216057308), mx::add(x, cube, s), s);
  }
  return mx::multiply(x, mx::sigmoid(z, s), s);
}

bool Gate::is_equivalent(const mx::Primitive& other) const {
  return gelu_ == static_cast<const Gate&>(other).gelu_;
}

} // namespace mlx_gguf::cpu
