// The gated delta rule on CUDA: one kernel, a block for some rows of a head.
#include "delta.h"

#include "../../cuda/step_params.h"

#include "cuda/launch.h"
#include "cuda/names.h"
#include "gpu/nodes.h"
#include "mlx/allocator.h"
#include "mlx/backend/cuda/utils.h"

namespace mlx_gguf::cuda {

void gated_delta(
    const std::vector<array>& inputs,
    std::vector<array>& outputs,
    mx::Stream s) {
  DeltaShape n(inputs);
  std::vector<std::optional<array>> in;
  for (const array& a : inputs) {
    in.push_back(aligned(in_rows(a, s), 16, s));
  }
  in.resize(7); // with a mask or none
  std::vector<const std::optional<array>*> read;
  void* at[7];
  for (int i = 0; i < 7; ++i) {
    read.push_back(&in[i]);
    at[i] = address(in[i]);
  }
  for (array& out : outputs) {
    out.set_data(mx::allocator::malloc(out.nbytes()));
  }
  void *y = mx::gpu_ptr<void>(outputs[0]), *to = mx::gpu_ptr<void>(outputs[1]);
  auto number = [](int a) { return static_cast<uint32_t>(a); };
  uint32_t tokens = number(n.tokens), key_heads = number(n.key_heads);
  uint32_t rows = number(n.rows);
  auto& encoder = mx::cu::get_command_encoder(s);
  encoder.set_output_array(outputs[1]);
  enqueue(
      function(delta_function(inputs[0].dtype(), n.width)),
      {.grid = {rows / delta_rows, number(n.heads), number(n.batch)},
       .block = {delta_threads, 1, 1}},
      read,
      outputs[0],
      {&at[0],
       &at[1],
       &at[2],
       &at[3],
       &at[4],
       &at[5],
       &at[6],
       &y,
       &to,
       &tokens,
       &key_heads,
       &rows},
      s);
}

} // namespace mlx_gguf::cuda
