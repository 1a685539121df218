// What the CUDA backend is to the extension: a shared object of its own, as it
// needs symbols that only MLX builds with CUDA have.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "../delta.h"
#include "../primitives.h"
#include "../step.h"

namespace mlx_gguf::cuda {

// x W^T, or x W, of M rows of x; for `experts` matrices W of M pairs of a row
// and a matrix. Of no rows: the numbers of W.
struct Problem {
  const Format* format;
  mx::Dtype x;
  int64_t M, N, K;
  int64_t experts = 0;
  bool transpose = true;
};

struct Backend {
  void (*quantized_matmul)(
      const std::vector<array>& inputs,
      array& out,
      const MatmulState& state,
      mx::Stream s);
  // Indices are not checked: the GPU reads them. As MLX's own gather_qmm.
  void (*gather_qmm)(
      const std::vector<array>& inputs,
      array& out,
      const Format& format,
      bool transpose,
      bool sorted,
      mx::Stream s);
  void (*dequantize)(
      const array& w, array& out, const Format& format, mx::Stream s);
  // One token through all layers: see step.h.
  StepFunction* step;
  DeltaFunction* gated_delta; // see delta.h
  // Copies host memory into an array's, in large pieces, and waits.
  void (*upload)(array& to, const void* from, size_t nbytes);
  // The same for a node's output, which gets memory of the device's own.
  void (*upload_output)(array& out, const void* from, mx::Stream s);
  // Makes the kernels of problems, and others by their C++ names, on many
  // threads, and waits: each takes about a second. One that cannot be made is
  // told of when it is used.
  void (*compile_ahead)(
      const std::vector<Problem>& problems,
      const std::vector<std::string>& functions);
  // What a report should say of the device and its software, by name.
  std::vector<std::pair<std::string, std::string>> (*describe)();
};

// The one function the shared object exports, by this name.
constexpr const char* entry_name = "mlx_gguf_cuda_backend";
using Entry = const Backend* (*)();

// Loads the shared object of a path; std::runtime_error with the reason if that
// fails. Once for the process; later calls do nothing.
void load(const std::string& path);

// nullptr until load().
const Backend* loaded();

} // namespace mlx_gguf::cuda
