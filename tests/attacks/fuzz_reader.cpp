// Fuzz target of the GGUF reader: parses, then decodes every value.
// Built and run by fuzz.sh.
#include <cstddef>
#include <cstdint>
#include <span>

#include "gguf/parse.h"
#include "gguf/split.h"

namespace {

struct CountingSink {
  uint64_t pieces = 0;
  void number(auto) {
    ++pieces;
  }
  void string(std::string_view text) {
    for (char c : text) { // touches every byte
      pieces += static_cast<unsigned char>(c);
    }
  }
  void begin(const mlx_gguf::gguf::ArrayHeader&) {}
  void end() {}
};

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace mlx_gguf::gguf;
  auto bytes = std::as_bytes(std::span(data, size));
  try {
    Header header = parse(bytes, "fuzz");
    CountingSink sink;
    for (const Entry& e : header.metadata) {
      Cursor in(bytes, "fuzz", e.value.offset);
      visit(in, e.value.type, sink);
    }
    for (const TensorInfo& t : header.tensors) {
      auto tensor = bytes.subspan(t.offset, t.nbytes);
      if (!tensor.empty()) {
        sink.number(std::to_integer<int>(tensor.front() ^ tensor.back()));
      }
    }
    if (auto split = read_split(bytes, header, "fuzz")) {
      sink.string(shard_paths("m-00001-of-00002.gguf", *split).back());
    }
    volatile uint64_t used = sink.pieces;
    static_cast<void>(used);
  } catch (const Error&) {
  }
  return 0;
}
