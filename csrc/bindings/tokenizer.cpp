// What a tokenizer needs that is slow in Python: a loop over every token.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "bindings/bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mlx_gguf {

namespace {

std::string_view utf8(nb::handle text) {
  Py_ssize_t size;
  const char* data = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
  if (!data) {
    nb::raise_python_error();
  }
  return {data, static_cast<size_t>(size)};
}

bool starts_character(char byte) {
  return (byte & 0xc0) != 0x80;
}

// All pairs of tokens that make a token of `order`, cut after its first
// character first.
nb::list splits(nb::list tokens, const nb::list& order) {
  std::vector<std::string_view> texts;
  std::unordered_map<std::string_view, size_t> ids;
  texts.reserve(tokens.size());
  ids.reserve(tokens.size());
  for (nb::handle token : tokens) {
    ids.emplace(utf8(token), texts.size());
    texts.push_back(utf8(token));
  }
  nb::list pairs;
  for (nb::handle i : order) {
    std::string_view text = texts.at(nb::cast<size_t>(i));
    for (size_t cut = 1; cut < text.size(); ++cut) {
      if (!starts_character(text[cut])) {
        continue;
      }
      auto left = ids.find(text.substr(0, cut));
      auto right = ids.find(text.substr(cut));
      if (left != ids.end() && right != ids.end()) {
        pairs.append(
            nb::make_tuple(tokens[left->second], tokens[right->second]));
      }
    }
  }
  return pairs;
}

// Texts cut at their first space; what follows is empty where there is none.
nb::list cut_at_spaces(const nb::list& texts) {
  nb::list pairs;
  for (nb::handle text : texts) {
    std::string_view all = utf8(text);
    size_t space = std::min(all.find(' '), all.size());
    std::string_view rest = all.substr(std::min(space + 1, all.size()));
    pairs.append(
        nb::make_tuple(
            nb::str(all.data(), space), nb::str(rest.data(), rest.size())));
  }
  return pairs;
}

} // namespace

void bind_tokenizer(nb::module_& m) {
  m.def(
      "splits",
      splits,
      "tokens"_a,
      "order"_a,
      nb::sig(
          "def splits(tokens: list[str], order: list[int]) -> "
          "list[tuple[str, str]]"),
      "Pairs of tokens whose union is a token of `order`, in that order.");
  m.def(
      "cut_at_spaces",
      cut_at_spaces,
      "texts"_a,
      nb::sig("def cut_at_spaces(texts: list[str]) -> list[tuple[str, str]]"),
      "Texts in two, without their first space.");
}

} // namespace mlx_gguf
