#include "cpu/eval.h"

#include <algorithm>
#include <map>
#include <optional>
#include <sstream>

#include "cpu/numbers.h"
#include "cpu/product.h"
#include "cpu/threads.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/utils.h"

namespace mlx_gguf::cpu {

namespace {

Product describe(
    const array& x, const array& w, const Format& format, bool transpose) {
  Product p{};
  p.format = &format;
  p.number = number_of(x.dtype());
  p.transpose = transpose;
  p.alpha = p.beta = 1.0f;
  p.N = w.shape(-2);
  p.K = w.shape(-1) / format.block_bytes * int64_t(format.block_size);
  return p;
}

// Enqueues work on the stream; the arrays' buffers outlive it (MLX keeps inputs
// and outputs of a node until its stream has passed it).
template <typename F>
void dispatch(
    const std::vector<array>& inputs, array& out, mx::Stream s, F&& work) {
  auto& encoder = mx::cpu::get_command_encoder(s);
  for (const array& a : inputs) {
    encoder.set_input_array(a);
  }
  encoder.set_output_array(out);
  std::vector<array> weak;
  for (const array& a : inputs) {
    weak.push_back(array::unsafe_weak_copy(a));
  }
  encoder.dispatch(
      [inputs = std::move(weak),
       out = array::unsafe_weak_copy(out),
       work = std::forward<F>(work)]() mutable { work(inputs, out); });
}

// An input's numbers in row order: its own, or a copy.
class InRows {
 public:
  explicit InRows(const array& a) : data_(a.data<char>()) {
    if (a.flags().row_contiguous || a.size() == 0) {
      return;
    }
    copy_.resize(a.nbytes());
    char* to = copy_.data();
    copy(a, 0, data_, to);
    data_ = copy_.data();
  }
  const char* get() const {
    return data_;
  }

 private:
  static void copy(const array& a, int axis, const char* from, char*& to) {
    int64_t item = static_cast<int64_t>(a.itemsize());
    if (axis == static_cast<int>(a.ndim())) {
      to = std::copy_n(from, item, to);
      return;
    }
    int64_t n = a.shape(axis), step = a.strides(axis) * item;
    if (axis + 1 == static_cast<int>(a.ndim()) && step == item) {
      to = std::copy_n(from, n * item, to);
      return;
    }
    for (int64_t i = 0; i < n; ++i) {
      copy(a, axis + 1, from + i * step, to);
    }
  }

  const char* data_;
  std::vector<char> copy_;
};

// Element offsets of the rows of `shape` (all axes but the last `trailing`) in
// a row-contiguous array that broadcasts to them.
std::vector<int64_t> row_offsets(
    const array& a, const mx::Shape& shape, int trailing) {
  int rows = static_cast<int>(shape.size()) - trailing;
  int shift = static_cast<int>(shape.size() - a.ndim());
  std::vector<int64_t> offsets{0};
  for (int i = 0; i < rows; ++i) {
    int axis = i - shift;
    int64_t stride = axis < 0 || a.shape(axis) == 1 ? 0 : 1;
    for (int j = axis + 1; stride && j < static_cast<int>(a.ndim()); ++j) {
      stride *= a.shape(j);
    }
    std::vector<int64_t> next;
    next.reserve(offsets.size() * shape[i]);
    for (int64_t offset : offsets) {
      for (int64_t n = 0; n < shape[i]; ++n) {
        next.push_back(offset + n * stride);
      }
    }
    offsets = std::move(next);
  }
  return offsets;
}

void matmul_task(
    const std::vector<array>& inputs, array& out, const MatmulState& state) {
  const array& x = inputs[0];
  const array& w = inputs[1];
  Product p = describe(x, w, *state.format, state.transpose);
  p.alpha = state.alpha;
  p.beta = state.beta;
  int64_t width = x.shape(-1);
  int64_t outputs = out.shape(-1);
  int64_t rows = static_cast<int64_t>(out.size()) / outputs;

  // The last axis of w's batch is the row axis of x, which w does not have.
  int64_t per_matrix = w.ndim() > 2 ? out.shape(-2) : rows;
  std::vector<int64_t> matrices =
      w.ndim() > 2 ? row_offsets(w, out.shape(), 2) : std::vector<int64_t>{0};
  std::vector<int64_t> x_rows = row_offsets(x, out.shape(), 1);
  std::vector<int64_t> c_rows;
  if (inputs.size() == 3) {
    const array& c = inputs[2];
    p.c_scalar = c.ndim() == 0 || c.shape(-1) != outputs;
    c_rows = row_offsets(c, out.shape(), 1);
  }

  InRows x_data(x);
  std::optional<InRows> c_data;
  if (inputs.size() == 3) {
    c_data.emplace(inputs[2]);
  }
  // Matrices that repeat along broadcast axes become one group.
  std::map<int64_t, Group> groups;
  size_t item = x.itemsize();
  for (int64_t r = 0; r < rows; ++r) {
    int64_t offset = matrices[r / per_matrix];
    Group& g = groups[offset];
    g.w = w.data<uint8_t>() + offset;
    const void* c = c_rows.empty() ? nullptr : c_data->get() + c_rows[r] * item;
    g.rows.push_back(
        {width ? x_rows[r] / width : 0,
         out.data<char>() + r * outputs * item,
         c});
  }
  std::vector<Group> list;
  for (auto& [_, g] : groups) {
    list.push_back(std::move(g));
  }
  // Without columns there still is a row, of nothing, to name.
  p.run(x_data.get(), width ? x.size() / width : 1, list);
}

void check_index(const char* name, uint32_t index, int64_t size) {
  if (index >= size) {
    std::ostringstream msg;
    msg << "[gather_qmm] Expected " << name << " below " << size
        << ". Received " << index << '.';
    throw std::out_of_range(msg.str());
  }
}

void gather_task(
    const std::vector<array>& inputs,
    array& out,
    const Format& format,
    bool transpose) {
  const array& x = inputs[0];
  const array& w = inputs[1];
  InRows x_data(x), lhs_data(inputs[2]), rhs_data(inputs[3]);
  auto lhs = reinterpret_cast<const uint32_t*>(lhs_data.get());
  auto rhs = reinterpret_cast<const uint32_t*>(rhs_data.get());
  Product p = describe(x, w, format, transpose);
  int64_t M = x.shape(-2);
  int64_t x_rows = M; // counted without K, which may be 0
  for (int i = 0; i + 2 < static_cast<int>(x.ndim()); ++i) {
    x_rows *= x.shape(i);
  }
  int64_t experts = w.shape(0);
  int64_t expert_bytes = int64_t(w.shape(1)) * w.shape(2);
  int64_t row_bytes = out.shape(-1) * x.itemsize();

  // Each expert's weights are read once, however its rows are scattered.
  std::vector<Group> groups(experts);
  for (size_t i = 0; i < inputs[2].size(); ++i) {
    check_index("lhs_indices", lhs[i], M ? x_rows / M : 0);
    check_index("rhs_indices", rhs[i], experts);
    Group& g = groups[rhs[i]];
    g.w = w.data<uint8_t>() + rhs[i] * expert_bytes;
    for (int64_t m = 0; m < M; ++m) {
      char* y = out.data<char>() + (i * M + m) * row_bytes;
      g.rows.push_back({lhs[i] * M + m, y, nullptr});
    }
  }
  std::erase_if(groups, [](const Group& g) { return g.rows.empty(); });
  p.run(x_data.get(), x_rows, groups);
}

void dequantize_task(const array& w, array& out, const Format& format) {
  Number number = number_of(out.dtype());
  TypeKernels type = isa().type(format.id);
  constexpr int64_t floats = 4096; // at a time; a multiple of every block size
  int64_t per_task = floats / format.block_size;
  int64_t blocks = static_cast<int64_t>(w.size()) / format.block_bytes;
  parallel_for((blocks + per_task - 1) / per_task, [&](int64_t i) {
    float values[floats];
    int64_t first = i * per_task;
    int64_t count = std::min(per_task, blocks - first);
    type.decode(w.data<uint8_t>() + first * format.block_bytes, count, values);
    isa().from_f32(
        number,
        values,
        count * format.block_size,
        out.data<char>() + first * format.block_size * out.itemsize());
  });
}

} // namespace

void quantized_matmul(
    const std::vector<array>& inputs,
    array& out,
    const MatmulState& state,
    mx::Stream s) {
  out.set_data(mx::allocator::malloc(out.nbytes()));
  if (out.size() > 0) {
    dispatch(inputs, out, s, [state](auto& inputs, array& out) {
      matmul_task(inputs, out, state);
    });
  }
}

void gather_qmm(
    const std::vector<array>& inputs,
    array& out,
    const Format& format,
    bool transpose,
    mx::Stream s) {
  out.set_data(mx::allocator::malloc(out.nbytes()));
  if (out.size() > 0) {
    dispatch(inputs, out, s, [&format, transpose](auto& inputs, array& out) {
      gather_task(inputs, out, format, transpose);
    });
  }
}

void dequantize(
    const array& w, array& out, const Format& format, mx::Stream s) {
  out.set_data(mx::allocator::malloc(out.nbytes()));
  if (out.size() > 0) {
    dispatch({w}, out, s, [&format](auto& inputs, array& out) {
      dequantize_task(inputs[0], out, format);
    });
  }
}

} // namespace mlx_gguf::cpu
