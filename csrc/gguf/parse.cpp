#include "gguf/parse.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <optional>

#include "gguf/names.h"

namespace mlx_gguf::gguf {

namespace {

constexpr std::string_view magic = "GGUF";
constexpr uint32_t min_version = 2;
constexpr uint32_t max_version = 3;
constexpr uint32_t max_dims = 4;
constexpr uint64_t default_alignment = 32;
constexpr uint64_t max_alignment = 1 << 20;

// The fewest bytes of a metadata entry (key length, value type, one byte) and
// of a tensor (name length, n_dims, one dim, type, offset).
constexpr uint64_t min_entry_bytes = 8 + 4 + 1;
constexpr uint64_t min_tensor_bytes = 8 + 4 + 8 + 4 + 8;

constexpr uint64_t max_int32 = std::numeric_limits<int32_t>::max();

// nullopt when the product does not fit.
std::optional<uint64_t> multiply(uint64_t a, uint64_t b) {
  uint64_t product;
  if (__builtin_mul_overflow(a, b, &product)) {
    return std::nullopt;
  }
  return product;
}

std::string number(uint64_t n) {
  return std::to_string(n);
}

std::string bytes_text(uint64_t n) {
  return number(n) + " bytes";
}

// What a file that does not start with the magic seems to be.
std::string describe_start(std::span<const std::byte> bytes) {
  std::string_view start(
      reinterpret_cast<const char*>(bytes.data()),
      std::min<size_t>(bytes.size(), 64));
  struct Kind {
    std::string_view prefix;
    const char* name;
  };
  static constexpr Kind kinds[] = {
      {"PK\x03\x04", "a zip archive (a PyTorch checkpoint or .npz)"},
      {"\x93NUMPY", "a NumPy array"},
      {"\x1f\x8b", "gzip data"},
      {"lmgg", "a GGML file, which is older than GGUF"},
      {"fmgg", "a GGMF file, which is older than GGUF"},
      {"tjgg", "a GGJT file, which is older than GGUF"},
      {"version https://git-lfs", "a Git LFS pointer, not the file itself"},
      {"\x80\x02", "a Python pickle"},
      {"\x7f"
       "ELF",
       "an ELF binary"},
      {"<", "HTML or XML, perhaps the error page of a download"},
  };
  for (const Kind& kind : kinds) {
    if (start.starts_with(kind.prefix)) {
      return kind.name;
    }
  }
  // safetensors: the length of a JSON object in 64 bits, then the object.
  if (start.size() > 8 && start[8] == '{') {
    return "a safetensors file";
  }
  return "a file that starts with " + quoted(start.substr(0, magic.size()));
}

void check_magic(Cursor& in, std::span<const std::byte> bytes) {
  std::string_view start(
      reinterpret_cast<const char*>(bytes.data()),
      std::min(bytes.size(), magic.size()));
  if (start != magic.substr(0, start.size())) {
    in.fail(
        ErrorKind::not_gguf,
        "the magic " + quoted(magic) + " at the start",
        describe_start(bytes));
  }
  in.take(magic.size(), "the magic");
}

uint32_t read_version(Cursor& in) {
  auto version = in.read<uint32_t>("the version");
  if (version < min_version || version > max_version) {
    // All real versions are small, so the other byte order shows.
    bool swapped = version != 0 && (version & 0xffff) == 0;
    in.fail(
        ErrorKind::version,
        "little-endian GGUF of version " + number(min_version) + " or " +
            number(max_version),
        swapped ? "big-endian data of version " +
                      number((version >> 24) | ((version >> 8) & 0xff00))
                : "version " + number(version));
  }
  return version;
}

template <typename Item>
void refuse_duplicates(
    const Cursor& in,
    const std::vector<Item>& items,
    std::string Item::* name,
    const char* what) {
  if (auto* twin = find_twin(items, order_by(items, name), name)) {
    in.fail(
        ErrorKind::malformed,
        std::string("every ") + what + " once",
        quoted(twin->*name) + " twice");
  }
}

std::vector<Entry> read_metadata(Cursor& in, uint64_t n) {
  std::vector<Entry> entries;
  for (uint64_t i = 0; i < n; ++i) {
    std::string key(in.text("a metadata key"));
    Value value = scan(in);
    entries.push_back({std::move(key), value});
  }
  refuse_duplicates(in, entries, &Entry::key, "metadata key");
  return entries;
}

uint64_t read_alignment(
    std::span<const std::byte> bytes,
    std::string_view path,
    const std::vector<Entry>& metadata) {
  constexpr std::string_view key = "general.alignment";
  auto entry =
      std::find_if(metadata.begin(), metadata.end(), [&](const Entry& e) {
        return e.key == key;
      });
  if (entry == metadata.end()) {
    return default_alignment;
  }
  Cursor in(bytes, path, entry->value.offset);
  if (entry->value.type != ValueType::uint32) {
    in.fail(
        ErrorKind::malformed,
        "general.alignment of type uint32",
        name_of(entry->value.type));
  }
  auto alignment = in.read<uint32_t>("general.alignment");
  if (!std::has_single_bit(alignment) || alignment > max_alignment) {
    in.fail(
        ErrorKind::malformed,
        "general.alignment to be a power of two up to " + number(max_alignment),
        number(alignment));
  }
  return alignment;
}

// The dims as MLX orders them, each an int32.
std::vector<int32_t> read_shape(Cursor& in, const std::string& tensor) {
  auto n_dims = in.read<uint32_t>("the number of dims of a tensor");
  if (n_dims == 0 || n_dims > max_dims) {
    in.fail(
        ErrorKind::malformed,
        tensor + " to have 1 to " + number(max_dims) + " dims",
        number(n_dims));
  }
  std::vector<int32_t> shape(n_dims);
  for (auto dim = shape.rbegin(); dim != shape.rend(); ++dim) {
    auto size = in.read<uint64_t>("a dim of a tensor");
    if (size > max_int32) {
      in.fail(
          ErrorKind::malformed,
          tensor + " to have dims of at most " + number(max_int32),
          number(size));
    }
    *dim = static_cast<int32_t>(size);
  }
  return shape;
}

uint64_t size_in_bytes(
    Cursor& in,
    const std::string& tensor,
    const Format& format,
    const std::vector<int32_t>& shape) {
  auto block_size = static_cast<uint64_t>(format.block_size);
  auto K = static_cast<uint64_t>(shape.back());
  if (K % block_size != 0) {
    in.fail(
        ErrorKind::malformed,
        tensor + " of type " + format.name + " to have rows of a multiple of " +
            number(block_size) + " weights",
        number(K));
  }
  // A row's bytes become a dim, too: of the packed array.
  uint64_t row_bytes = K / block_size * format.block_bytes;
  if (format.packed() && row_bytes > max_int32) {
    in.fail(
        ErrorKind::malformed,
        tensor + " to have rows of at most " + bytes_text(max_int32),
        bytes_text(row_bytes));
  }
  // Dims of 0 are left out: the others must make sense, too, because MLX
  // multiplies them up for strides.
  std::optional<uint64_t> size = std::max<uint64_t>(row_bytes, 1);
  for (size_t i = 0; i + 1 < shape.size() && size; ++i) {
    size = multiply(*size, std::max(shape[i], 1));
  }
  if (!size || *size > std::numeric_limits<int64_t>::max()) {
    in.fail(
        ErrorKind::malformed,
        tensor + " to have a size in bytes below 2^63",
        "dims whose product is larger");
  }
  bool empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
  return empty ? 0 : *size;
}

TensorInfo read_tensor(Cursor& in) {
  TensorInfo t;
  t.name = in.text("a tensor name");
  std::string tensor = "tensor " + quoted(t.name);
  t.shape = read_shape(in, tensor);
  auto id = in.read<uint32_t>("the type of a tensor");
  t.format = find_format(id);
  if (!t.format) {
    in.fail(
        ErrorKind::unsupported_type,
        tensor + " to have a tensor type whose size is known",
        "type id " + number(id));
  }
  t.nbytes = size_in_bytes(in, tensor, *t.format, t.shape);
  t.offset = in.read<uint64_t>("the offset of a tensor");
  return t;
}

// Turns offsets from the data section into offsets from the file's start.
void place_tensors(
    const Cursor& in,
    std::vector<TensorInfo>& tensors,
    uint64_t alignment,
    uint64_t file_size) {
  // No overflow: the cursor is within a file and the alignment is small.
  uint64_t data = (in.position() + alignment - 1) / alignment * alignment;
  for (TensorInfo& t : tensors) {
    std::string tensor = "tensor " + quoted(t.name);
    if (t.offset % alignment != 0) {
      in.fail(
          ErrorKind::malformed,
          tensor + " at an offset that is a multiple of " + number(alignment),
          number(t.offset));
    }
    uint64_t end;
    if (__builtin_add_overflow(data, t.offset, &t.offset) ||
        __builtin_add_overflow(t.offset, t.nbytes, &end)) {
      in.fail(
          ErrorKind::malformed,
          tensor + " to end below 2^64",
          "an offset close to it");
    }
    if (end > file_size) {
      in.fail(
          ErrorKind::truncated,
          tensor + " of " + bytes_text(t.nbytes) + " to end at byte " +
              number(end),
          "a file of " + bytes_text(file_size));
    }
  }
}

void refuse_overlaps(const Cursor& in, const std::vector<TensorInfo>& tensors) {
  std::vector<const TensorInfo*> order;
  for (const TensorInfo& t : tensors) {
    if (t.nbytes > 0) {
      order.push_back(&t);
    }
  }
  std::sort(order.begin(), order.end(), [](auto* a, auto* b) {
    return a->offset < b->offset;
  });
  for (size_t i = 1; i < order.size(); ++i) {
    const TensorInfo& before = *order[i - 1];
    const TensorInfo& after = *order[i];
    if (before.offset + before.nbytes > after.offset) {
      in.fail(
          ErrorKind::malformed,
          "tensors that do not overlap",
          quoted(before.name) + " of " + bytes_text(before.nbytes) +
              " at byte " + number(before.offset) + " and " +
              quoted(after.name) + " at byte " + number(after.offset));
    }
  }
}

} // namespace

Header parse(std::span<const std::byte> bytes, std::string_view path) {
  Cursor in(bytes, path);
  check_magic(in, bytes);
  Header header;
  header.version = read_version(in);
  auto n_tensors = in.count(1, "a number of tensors");
  auto n_entries = in.count(min_entry_bytes, "a number of metadata entries");
  header.metadata = read_metadata(in, n_entries);
  header.alignment = read_alignment(bytes, path, header.metadata);
  if (n_tensors > in.remaining() / min_tensor_bytes) {
    in.fail(
        ErrorKind::truncated,
        "a number of tensors of at most " +
            number(in.remaining() / min_tensor_bytes) + " (" +
            bytes_text(in.remaining()) + " left)",
        number(n_tensors));
  }
  for (uint64_t i = 0; i < n_tensors; ++i) {
    header.tensors.push_back(read_tensor(in));
  }
  refuse_duplicates(in, header.tensors, &TensorInfo::name, "tensor name");
  place_tensors(in, header.tensors, header.alignment, bytes.size());
  refuse_overlaps(in, header.tensors);
  return header;
}

} // namespace mlx_gguf::gguf
