// Looking things up by name. Sorted rather than hashed: no choice of names in
// a file makes it slow.
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

namespace mlx_gguf::gguf {

// Indices of `items` in the order of their names.
template <typename Item>
std::vector<size_t> order_by(
    const std::vector<Item>& items, std::string Item::* name) {
  std::vector<size_t> order(items.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return items[a].*name < items[b].*name;
  });
  return order;
}

// An item that shares its name with another, or nullptr.
template <typename Item>
const Item* find_twin(
    const std::vector<Item>& items,
    const std::vector<size_t>& order,
    std::string Item::* name) {
  auto twin =
      std::adjacent_find(order.begin(), order.end(), [&](size_t a, size_t b) {
        return items[a].*name == items[b].*name;
      });
  return twin == order.end() ? nullptr : &items[*twin];
}

template <typename Item>
const Item* find_name(
    const std::vector<Item>& items,
    const std::vector<size_t>& order,
    std::string Item::* name,
    std::string_view wanted) {
  auto it = std::lower_bound(
      order.begin(), order.end(), wanted, [&](size_t i, std::string_view w) {
        return items[i].*name < w;
      });
  bool found = it != order.end() && items[*it].*name == wanted;
  return found ? &items[*it] : nullptr;
}

} // namespace mlx_gguf::gguf
