// The mask of cpu/fast_attention.cpp: booleans, or numbers to be added.
#pragma once

#include <limits>
#include <vector>

#include "cpu/fast_task.h"

namespace mlx_gguf::cpu {

// What MLX gives a score that a boolean hides: a row without any other becomes
// the mean of all values.
inline constexpr float hidden = -std::numeric_limits<float>::max();

struct Mask {
  View view; // of an array that broadcasts to [B, H, L, S]
  bool boolean;

  struct Row {
    int64_t at, step; // the first key's element and the way to the next
  };

  Row row(int64_t batch, int64_t head, int64_t query, int64_t key) const {
    int64_t index[] = {batch, head, query, key};
    int axes = static_cast<int>(view.shape.size());
    Row row{0, 0};
    for (int axis = 0; axis < axes; ++axis) {
      if (view.shape[axis] > 1) {
        row.at += index[4 - axes + axis] * view.strides[axis];
      }
    }
    if (axes > 0 && view.shape.back() > 1) {
      row.step = view.step();
    }
    return row;
  }

  bool same_for_all_heads() const {
    size_t axes = view.shape.size();
    return axes < 3 || view.shape[axes - 3] == 1;
  }

  // To the scores of n keys.
  void apply(Row row, int64_t n, float* s) const {
    if (boolean) {
      const char* seen = view.data + row.at;
      for (int64_t j = 0; j < n; ++j) {
        s[j] = seen[j * row.step] ? s[j] : hidden;
      }
      return;
    }
    float added[attention_keys];
    view.read(row.at, row.step, n, added);
    for (int64_t j = 0; j < n; ++j) {
      s[j] += added[j];
    }
  }

  // Marks the blocks of keys of which a boolean row shows any.
  bool mark(Row row, int64_t keys, std::vector<char>& blocks) const {
    const char* seen = view.data + row.at;
    bool any = false;
    for (size_t b = 0; b < blocks.size(); ++b) {
      int64_t first = static_cast<int64_t>(b) * attention_keys;
      char shown = 0;
      for (int64_t j = first; j < std::min(keys, first + attention_keys); ++j) {
        shown |= seen[j * row.step];
      }
      blocks[b] |= shown;
      any |= shown != 0;
    }
    return any;
  }
};

} // namespace mlx_gguf::cpu
