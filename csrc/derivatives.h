// Derivatives of a node by those of a function that spells it out in MLX's own
// operations.
#pragma once

#include <functional>
#include <vector>

#include "mlx/array.h"
#include "mlx/transforms.h"

namespace mlx_gguf {

using SpelledOut = std::function<std::vector<mlx::core::array>(
    const std::vector<mlx::core::array>&)>;

// With respect to the arguments asked for alone: others may be integers.
class Derivatives {
 public:
  Derivatives(
      SpelledOut function,
      const std::vector<mlx::core::array>& primals,
      const std::vector<int>& argnums)
      : primals_(primals) {
    for (int i : argnums) {
      some_.push_back(primals[i]);
    }
    function_ = [this, function = std::move(function), argnums](
                    const std::vector<mlx::core::array>& some) {
      std::vector<mlx::core::array> all = primals_;
      for (size_t i = 0; i < argnums.size(); ++i) {
        all[argnums[i]] = some[i];
      }
      return function(all);
    };
  }
  Derivatives(const Derivatives&) = delete;

  std::vector<mlx::core::array> vjp(
      const std::vector<mlx::core::array>& cotangents) const {
    return mlx::core::vjp(function_, some_, cotangents).second;
  }
  std::vector<mlx::core::array> jvp(
      const std::vector<mlx::core::array>& tangents) const {
    return mlx::core::jvp(function_, some_, tangents).second;
  }

 private:
  std::vector<mlx::core::array> primals_, some_;
  SpelledOut function_;
};

} // namespace mlx_gguf
