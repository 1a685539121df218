// The gated delta rule on the CPU: a head at a time, whose state stays in the
// cache for all tokens.
#include "delta.h"

#include <algorithm>
#include <memory>
#include <optional>

#include "cpu/fast_task.h"

namespace mlx_gguf::cpu {

namespace {

constexpr int64_t some_tokens = 64; // read at a time

struct DeltaTask {
  DeltaShape n;
  View q, k, v, g, beta, state;
  std::optional<View> mask;
  Target y;
  float* states;

  void head(int64_t b, int64_t h) const {
    const int64_t room = std::min<int64_t>(some_tokens, n.tokens);
    const int64_t D = n.width, R = n.rows, key = h / (n.heads / n.key_heads);
    Buffer buffer(room * (2 * D + 2 * R + 3) * sizeof(float));
    float* queries = floats_of(buffer);
    float* keys = queries + room * D;
    float* values = keys + room * D;
    float* out = values + room * R;
    float* decay = out + room * R;
    float* betas = decay + room;
    float* mine = states + (b * n.heads + h) * R * D;
    const float* from = first_state(b, h, mine);
    for (int64_t first = 0; first < n.tokens; first += room) {
      int64_t count = std::min<int64_t>(room, n.tokens - first);
      for (int64_t i = 0; i < count; ++i) {
        int64_t t = b * n.tokens + first + i;
        if (counts(b, first + i)) {
          q.read(q.row(t * n.key_heads + key), q.step(), D, queries + i * D);
          k.read(k.row(t * n.key_heads + key), k.step(), D, keys + i * D);
          v.read(v.row(t * n.heads + h), v.step(), R, values + i * R);
          g.read(g.row(t) + h * g.step(), 1, 1, decay + i);
          beta.read(beta.row(t) + h * beta.step(), 1, 1, betas + i);
        } else {
          // Whatever they are: 0 times what is not finite is NaN.
          std::fill_n(queries + i * D, D, 0.0f);
          std::fill_n(keys + i * D, D, 0.0f);
          std::fill_n(values + i * R, R, 0.0f);
          decay[i] = 1.0f;
          betas[i] = 0.0f;
        }
      }
      isa().fast.gated_delta(
          {count,
           R,
           D,
           queries,
           keys,
           values,
           decay,
           betas,
           from,
           mine,
           betas + room,
           out});
      from = mine;
      for (int64_t i = 0; i < count; ++i) {
        if (!counts(b, first + i)) {
          std::fill_n(out + i * R, R, 0.0f);
        }
        write(out + i * R, ((b * n.tokens + first + i) * n.heads + h) * R);
      }
    }
  }

  void operator()() const {
    parallel_for(int64_t{n.batch} * n.heads, [&](int64_t i) {
      head(i / n.heads, i % n.heads);
    });
  }

 private:
  // In place, or copied to where the last one goes.
  const float* first_state(int64_t b, int64_t h, float* mine) const {
    int64_t row = (b * n.heads + h) * n.rows;
    if (state.step() == 1 && state.strides[2] == n.width) {
      return reinterpret_cast<const float*>(state.data) + state.row(row);
    }
    for (int64_t r = 0; r < n.rows; ++r) {
      state.read(state.row(row + r), state.step(), n.width, mine + r * n.width);
    }
    return mine;
  }
  bool counts(int64_t b, int64_t t) const {
    return !mask ||
           mask->data[b * mask->strides[0] + t * mask->strides[1]] != 0;
  }
  void write(const float* from, int64_t at) const {
    if (y.number == Number::f32) {
      std::copy_n(from, n.rows, reinterpret_cast<float*>(y.data) + at);
    } else {
      y.write(from, at, n.rows);
    }
  }
};

} // namespace

void gated_delta(
    const std::vector<array>& inputs,
    std::vector<array>& outputs,
    mx::Stream s) {
  auto& encoder = mx::cpu::get_command_encoder(s);
  for (const array& a : inputs) {
    encoder.set_input_array(a);
  }
  for (array& a : outputs) {
    a.set_data(mx::allocator::malloc(a.nbytes()));
    encoder.set_output_array(a);
  }
  auto at = [&](int i) { return View(inputs[i]); };
  encoder.dispatch(
      DeltaTask{
          DeltaShape(inputs),
          at(0),
          at(1),
          at(2),
          at(3),
          at(4),
          at(5),
          inputs.size() == 7 ? std::optional(at(6)) : std::nullopt,
          Target(outputs[0]),
          outputs[1].data<float>()});
}

} // namespace mlx_gguf::cpu
