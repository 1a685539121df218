// What an instruction set provides. csrc/cpu/isa_*.cpp compile the same
// interface for one instruction set each; dispatch.cpp picks at run time.
#pragma once

#include <cstdint>
#include <vector>

namespace mlx_gguf::cpu {

// f32 rows of x are padded with zeros to a multiple of this.
inline constexpr int64_t x_padding = 16;

// Rows of weights a product kernel works on together.
inline constexpr int64_t row_group = 4;

// Weights along K decoded at a time: row_group of them stay in the first-level
// cache. A multiple of every block size and of x_padding.
inline constexpr int64_t k_tile = 1024;

// Floats of scratch a product of M rows needs.
constexpr int64_t product_scratch(int64_t M) {
  return row_group * k_tile + M * row_group * x_padding;
}

enum class Number { f16, bf16, f32 };

// Kernels of one tensor type.
struct TypeKernels {
  // n_blocks blocks to f32.
  void (*decode)(const uint8_t* blocks, int64_t n_blocks, float* out);

  // y[m][r] = x[m] . W[r] for the n rows (at most row_group) of K weights at w,
  // row_bytes apart. x: M pointers to padded rows. A value depends on its x row
  // and weight row alone, not on M or n.
  void (*product)(
      const uint8_t* w,
      int64_t row_bytes,
      int64_t n,
      int64_t K,
      const float* const* x,
      int64_t M,
      float (*y)[row_group],
      float* scratch);

  // y[m * y_stride + r] for any n and for 1 to max_fixed_rows rows of x in
  // fixed point (Isa::fix); nullptr where the instruction set or the type has
  // no such kernel. A value depends on its x row and weight row alone.
  void (*gemv)(
      const uint8_t* w,
      int64_t row_bytes,
      int64_t n,
      int64_t K,
      const void* const* x,
      int64_t M,
      float* y,
      int64_t y_stride);

  // y[r][m] = W[r] . x[m] for n rows of w, at most Isa::gemm_rows, and rows of
  // x in `vectors` packs of 16 (Isa::pack); y has room for n rounded up to a
  // multiple of Isa::gemm_unit rows. A value depends on its x row and weight
  // row alone. Where gemv is nullptr, so is this.
  void (*gemm)(
      const uint8_t* w,
      int64_t row_bytes,
      int64_t n,
      int64_t K,
      const void* const* x,
      int64_t vectors,
      float* y);

  // For Isa::fix and Isa::pack: the order in which gemv and gemm read 16 times
  // 16 weights, and whether 32 of them share a scale, or 16.
  const uint8_t* order;
  bool groups_of_32;
  // Whether a gemm on tiles takes weights in that order, or as they follow each
  // other.
  bool tiles_in_order;
  // Whether gemv of one row of x takes it in planes; and what x counts for the
  // weights, if not they do: their codes are too large by so much, or so are
  // products with scales, whose sums are those of all 256.
  bool planes;
  int bias;
  bool bias_of_all;
};

// Rows of x that share one read of the weights in gemv, and those of a pack.
inline constexpr int64_t max_fixed_rows = 8;
inline constexpr int64_t pack_rows = 16;

// Rows of w for gemm at once, at most.
inline constexpr int64_t most_gemm_rows = 64;

// Keys that attention takes at a time, and the rows of queries that share them.
inline constexpr int64_t attention_keys = 64;
inline constexpr int64_t attention_rows = 64;

// A block of keys and values against rows of queries. Widths are multiples of
// x_padding; q, scores and out are without gaps between rows.
struct AttentionBlock {
  int64_t rows;
  int64_t keys; // 1 to attention_keys
  int64_t k_width;
  int64_t v_width;
  const float* q; // times the scale
  const float* k;
  const float* v;
  int64_t k_stride;
  int64_t v_stride;
  float* scores; // [rows][attention_keys]
  // Over all blocks so far, of every row: its largest score, the sum of
  // e^(score
  // - largest), and that of the values so weighted.
  float* largest;
  float* sums;
  float* out;
};

// One head's state, [rows][width], and tokens of it, without gaps; width is a
// multiple of x_padding, rows of 4.
struct DeltaRows {
  int64_t tokens;
  int64_t rows;
  int64_t width;
  const float* q; // [tokens][width]
  const float* k;
  const float* v;     // [tokens][rows]
  const float* decay; // [tokens]
  const float* beta;
  const float* from; // the state before, which may be where it goes
  float* state;
  float* both; // [tokens], for the kernel's own use
  float* y;    // [tokens][rows]
};

// Kernels of the operations in cpu/fast.h and of delta.h.
struct FastKernels {
  // y = x / sqrt(mean(x^2) + eps) * w; w may be nullptr.
  void (*rms_norm)(
      const float* x, const float* w, float eps, int64_t n, float* y);
  // cos and sin of position * speeds[i], all padded to a multiple of x_padding.
  void (*rotations)(
      double position, const double* speeds, int64_t n, float* cos, float* sin);
  // Rotates `half` pairs: neighbours if traditional, else `half` apart.
  void (*rotate)(
      const float* x,
      const float* cos,
      const float* sin,
      int64_t half,
      bool traditional,
      float* y);
  // x / (1 + e^-z), where z is x, or that of the tanh form of GELU.
  void (*gate)(const float* x, bool gelu, int64_t n, float* y);
  // The largest of x, and the sum of e^(x - largest); NaN in `sum` if a value
  // is not finite.
  void (*exponentials)(const float* x, int64_t n, float* largest, float* sum);
  // Fills in the scores; then, once masked, adds them up.
  void (*attention_scores)(const AttentionBlock& block);
  void (*attention_values)(const AttentionBlock& block);
  void (*gated_delta)(const DeltaRows& rows);
};

struct Isa {
  const char* name;
  TypeKernels (*type)(uint32_t format_id);
  void (*to_f32)(Number from, const void* src, int64_t n, float* dst);
  void (*from_f32)(Number to, const float* src, int64_t n, void* dst);
  // Bytes of a row of x in fixed point, to be aligned to 64; and the row
  // itself, to `tolerance` of its norm; or false if it has
  // values that fixed point does not hold. nullptr where no type has a gemv.
  // In planes, for gemv of this row alone: the same numbers in another order.
  int64_t (*fixed_bytes)(int64_t K);
  bool (*fix)(
      const float* x,
      int64_t K,
      const TypeKernels& type,
      float tolerance,
      bool in_planes,
      void* out);
  // Bytes of a pack, to be aligned to 64; and the pack of at most pack_rows
  // fixed rows, nullptr for those that are missing.
  int64_t (*packed_bytes)(int64_t K);
  void (*pack)(
      const void* const* rows, int64_t K, const TypeKernels& type, void* out);
  // Rows of w that gemm takes at a time, and what it rounds them up to.
  int64_t gemm_rows = 1, gemm_unit = 1;
  // y += a * x
  void (*axpy)(float a, const float* x, int64_t n, float* y);
  FastKernels fast;
};

// The instruction sets of this machine, the best first.
const std::vector<const Isa*>& isas();

// The best of them, or the one MLX_GGUF_ISA names.
const Isa& isa();

} // namespace mlx_gguf::cpu
