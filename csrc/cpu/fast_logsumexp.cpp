#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "cpu/fast.h"
#include "cpu/fast_task.h"
#include "mlx/ops.h"

namespace mlx_gguf::cpu {

namespace {

using Arrays = std::vector<array>;

// Numbers that one kernel call adds up; a row's result is the same on any
// number of threads.
constexpr int64_t part = 8192;

struct Partial {
  float largest, sum;
};

// Where a value is not finite, number by number.
float of_any(const View& x, int64_t at, int64_t n) {
  double most = -std::numeric_limits<double>::infinity(), sum = 0;
  std::vector<float> values(n);
  x.read(at, x.step(), n, values.data());
  for (float v : values) {
    if (std::isnan(v)) {
      return v;
    }
    most = std::fmax(most, v);
  }
  if (std::isinf(most)) {
    return static_cast<float>(most);
  }
  for (float v : values) {
    sum += std::exp(v - most);
  }
  return static_cast<float>(most + std::log(sum));
}

float combine(const Partial* parts, int64_t count) {
  double most = parts[0].largest, sum = 0;
  for (int64_t i = 1; i < count; ++i) {
    most = std::fmax(most, parts[i].largest);
  }
  for (int64_t i = 0; i < count; ++i) {
    sum += parts[i].sum * std::exp(parts[i].largest - most);
  }
  return static_cast<float>(most + std::log(sum));
}

void log_sums(const View& x, const Target& out) {
  int64_t n = x.shape.back(), rows = 1;
  for (int size : x.shape) {
    rows *= size;
  }
  rows /= n;
  int64_t parts = (n + part - 1) / part;
  std::vector<Partial> partials(rows * parts);
  for_parts(rows * parts, std::min(n, part), [&](int64_t first, int64_t last) {
    Buffer scratch(part * sizeof(float));
    for (int64_t i = first; i < last; ++i) {
      int64_t begin = i % parts * part, count = std::min(part, n - begin);
      int64_t at = x.row(i / parts) + begin * x.step();
      const float* values = reinterpret_cast<const float*>(x.data) + at;
      if (x.number != Number::f32 || x.step() != 1) {
        x.read(at, x.step(), count, floats_of(scratch));
        values = floats_of(scratch);
      }
      Partial& p = partials[i];
      isa().fast.exponentials(values, count, &p.largest, &p.sum);
    }
  });
  for (int64_t r = 0; r < rows; ++r) {
    float y = combine(&partials[r * parts], parts);
    if (std::isnan(y)) {
      y = of_any(x, x.row(r), n);
    }
    *out.floats(r, &y) = y;
    out.write(&y, r, 1);
  }
}

} // namespace

std::optional<array> logsumexp(const array& x, mx::StreamOrDevice s) {
  auto stream = our_stream(s);
  if (!stream || !is_number(x.dtype()) || x.ndim() == 0 || x.size() == 0) {
    return std::nullopt;
  }
  mx::Shape shape = x.shape();
  shape.back() = 1;
  return array(
      std::move(shape),
      x.dtype(),
      std::make_shared<LogSumExp>(*stream),
      Arrays{x});
}

void LogSumExp::eval_cpu(const Arrays& inputs, array& out) {
  out.set_data(mx::allocator::malloc(out.nbytes()));
  enqueue(inputs, out, stream(), [x = View(inputs[0]), to = Target(out)] {
    log_sums(x, to);
  });
}

std::vector<mx::Shape> LogSumExp::output_shapes(const Arrays& inputs) {
  mx::Shape shape = inputs[0].shape();
  shape.back() = 1;
  return {shape};
}

array LogSumExp::spelled_out(const Arrays& inputs) {
  return mx::logsumexp(inputs[0], -1, true, stream());
}

} // namespace mlx_gguf::cpu
