// Runs csrc/metal/eval.cpp on the stand-in against the same product from MLX's
// own operations. Prints each failure and last the number of cases.
#include <functional>
#include <iostream>
#include <sstream>

#include "formats.h"
#include "metal/eval.h"
#include "mlx/mlx.h"
#include "primitives.h"

namespace {

namespace mx = mlx::core;
using mlx_gguf::Format;
using mx::array;
using Eval = std::function<void(const std::vector<array>&, array&, mx::Stream)>;

// A graph node that evaluates on the CPU stream as it would on Metal's.
class Node : public mx::UnaryPrimitive {
 public:
  Node(mx::Stream s, Eval eval) : UnaryPrimitive(s), eval_(std::move(eval)) {}
  void eval_cpu(const std::vector<array>& inputs, array& out) override {
    eval_(inputs, out, stream());
  }
  void eval_gpu(const std::vector<array>&, array&) override {}
  const char* name() const override {
    return "Node";
  }

 private:
  Eval eval_;
};

array node(std::vector<array> inputs, mx::Shape shape, mx::Dtype t, Eval eval) {
  for (array& a : inputs) {
    a = mx::contiguous(a);
  }
  auto s = mx::default_stream(mx::Device::cpu);
  return array(
      std::move(shape),
      t,
      std::make_shared<Node>(s, std::move(eval)),
      std::move(inputs));
}

int failures = 0, cases = 0;

// Stands for the shape of the output.
const mx::Shape whole{0};

// y against a reference in f32, as far as the rounding of y's dtype allows.
void compare(const std::string& what, const array& y, const array& ref) {
  ++cases;
  array want = mx::astype(ref, mx::float32);
  array got = mx::astype(y, mx::float32);
  bool same = got.shape() == want.shape();
  if (same && got.size() > 0) {
    float scale = y.dtype() == mx::float32   ? 1e-5f
                  : y.dtype() == mx::float16 ? 1e-3f
                                             : 8e-3f;
    array error = mx::max(mx::abs(got - want));
    array size = mx::max(mx::abs(want));
    same = error.item<float>() <= scale * (size.item<float>() + 1e-3f);
  }
  if (!same) {
    ++failures;
    std::ostringstream shapes;
    shapes << got.shape() << " for " << want.shape();
    std::cout << "failed: " << what << ' ' << shapes.str() << '\n';
  }
}

// Random packed weights and the numbers they are.
struct Weights {
  array packed;
  array values;
};

Weights weights(const Format& format, const mx::Shape& shape) {
  mx::Shape packed_shape = shape;
  packed_shape.back() = static_cast<int>(format.row_bytes(shape.back()));
  if (format.plain) {
    array values = mx::random::normal(shape);
    return {mx::view(values, mx::uint8), values};
  }
  mx::Shape blocks = shape;
  blocks.back() /= 32;
  blocks.push_back(32);
  array codes = mx::random::randint(-127, 128, blocks, mx::int8);
  blocks.back() = 1;
  array scales = mx::astype(mx::random::normal(blocks), mx::float16);
  array packed = mx::concatenate(
      {mx::view(scales, mx::uint8), mx::view(codes, mx::uint8)}, -1);
  array values =
      mx::astype(scales, mx::float32) * mx::astype(codes, mx::float32);
  return {mx::reshape(packed, packed_shape), mx::reshape(values, shape)};
}

void check_product(
    const Format& format,
    mx::Dtype t,
    bool transpose,
    const mx::Shape& x_batch,
    const mx::Shape& w_batch,
    int M,
    const std::optional<mx::Shape>& c_shape) {
  int N = 37, K = 64;
  mx::Shape w_shape = w_batch;
  w_shape.insert(w_shape.end(), {N, K});
  mx::Shape x_shape = x_batch;
  x_shape.insert(x_shape.end(), {M, transpose ? K : N});
  Weights w = weights(format, w_shape);
  array x = mx::astype(mx::random::normal(x_shape), t);
  array wide = transpose ? mx::swapaxes(w.values, -1, -2) : w.values;
  array ref = mx::matmul(mx::astype(x, mx::float32), wide);
  std::vector<array> inputs{x, w.packed};
  mlx_gguf::MatmulState state{&format, transpose};
  if (c_shape) {
    mx::Shape shape = *c_shape == whole ? ref.shape() : *c_shape;
    for (int& n : shape) {
      n = n < 0 ? ref.shape(n) : n;
    }
    array c = mx::astype(mx::random::normal(shape), t);
    inputs.push_back(c);
    state.alpha = 0.5f;
    state.beta = -2.0f;
    ref = 0.5f * ref - 2.0f * mx::astype(c, mx::float32);
  }
  array y =
      node(inputs, ref.shape(), t, [state](auto& in, array& out, mx::Stream s) {
        mlx_gguf::metal::quantized_matmul(in, out, state, s);
      });
  std::ostringstream what;
  what << "matmul " << format.name << ' ' << t << " transpose " << transpose
       << " x " << x.shape() << " w " << w_shape << " c "
       << (c_shape ? *c_shape : mx::Shape{});
  compare(what.str(), y, ref);
}

void check_gather(
    const Format& format, bool transpose, int M, int pairs, bool sorted) {
  int N = 37, K = 64, experts = 5, x_count = 4;
  Weights w = weights(format, {experts, N, K});
  array x = mx::random::normal({x_count, M, transpose ? K : N});
  array lhs = mx::random::randint(0, x_count, {pairs}, mx::uint32);
  array rhs = mx::random::randint(0, experts, {pairs}, mx::uint32);
  if (sorted) {
    rhs = mx::sort(rhs);
  }
  array wide = transpose ? mx::swapaxes(w.values, -1, -2) : w.values;
  array ref = mx::matmul(mx::take(x, lhs, 0), mx::take(wide, rhs, 0));
  array y = node(
      {x, w.packed, lhs, rhs},
      ref.shape(),
      mx::float32,
      [&format, transpose, sorted](auto& in, array& out, mx::Stream s) {
        mlx_gguf::metal::gather_qmm(in, out, format, transpose, sorted, s);
      });
  std::ostringstream what;
  what << "gather " << format.name << " transpose " << transpose << " M " << M
       << " pairs " << pairs << " sorted " << sorted;
  compare(what.str(), y, ref);
}

void check_dequantize(const Format& format, const mx::Shape& shape) {
  Weights w = weights(format, shape);
  array y = node(
      {w.packed},
      shape,
      mx::float16,
      [&format](auto& in, array& out, mx::Stream s) {
        mlx_gguf::metal::dequantize(in[0], out, format, s);
      });
  compare(std::string("dequantize ") + format.name, y, w.values);
}

} // namespace

int main() {
  mx::set_default_device(mx::Device::cpu);
  using Shapes = std::vector<std::optional<mx::Shape>>;
  // -1 and -2 are the output's own.
  Shapes cs{
      std::nullopt,
      mx::Shape{},
      mx::Shape{-1},
      mx::Shape{-2, 1},
      mx::Shape{1, -1},
      mx::Shape{-2, -1},
      whole};
  std::vector<std::pair<mx::Shape, mx::Shape>> batches{
      {{}, {}},
      {{3}, {}},
      {{3}, {1}},
      {{3}, {3}},
      {{1}, {3}},
      {{}, {3}},
      {{2, 3}, {3}},
      {{2, 3}, {2, 1}},
      {{2, 1}, {1, 3}},
      {{2, 3}, {2, 3}}};
  for (const char* name : {"f32", "q8_0"}) {
    const Format& format = *mlx_gguf::find_format(name);
    for (bool transpose : {true, false}) {
      for (auto& [x, w] : batches) {
        for (auto& c : cs) {
          for (int M : {1, 2, 5, 33}) {
            check_product(format, mx::float32, transpose, x, w, M, c);
          }
        }
      }
      for (mx::Dtype t : {mx::float16, mx::bfloat16, mx::float32}) {
        for (auto& c : cs) {
          // The last two of these rows are dequantised for a packed type.
          for (int M : {1, 40, 512, 700}) {
            check_product(format, t, transpose, {}, {}, M, c);
          }
          check_product(format, t, transpose, {2}, {2}, 512, c);
        }
      }
      check_product(format, mx::float32, transpose, {}, {}, 0, std::nullopt);
      check_product(format, mx::float32, transpose, {0}, {}, 2, std::nullopt);
      for (bool sorted : {false, true}) {
        for (int pairs : {0, 1, 7, 64, 200}) {
          for (int M : {1, 3, 20}) {
            check_gather(format, transpose, M, pairs, sorted);
          }
        }
      }
    }
    check_dequantize(format, {64});
    check_dequantize(format, {37, 2048});
    check_dequantize(format, {2, 3, 96});
    check_dequantize(format, {0, 64});
  }
  std::cout << cases << " cases, " << failures << " failed\n";
  return failures != 0;
}
