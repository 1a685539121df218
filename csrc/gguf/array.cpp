#include "gguf/array.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <utility>

#include "cuda/backend.h"
#include "mlx/backend/gpu/device_info.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"

namespace mlx_gguf::gguf {

namespace {

namespace mx = mlx::core;
namespace alloc = mlx::core::allocator;

using Address = std::uintptr_t;

// Where an array's bytes are: in a buffer, from an offset in bytes.
struct Placement {
  alloc::Data data;
  uint64_t offset;
};

// MLX's CPU allocator addresses a buffer by a header that lies this many bytes
// before the data. nullopt when another allocator is in use.
std::optional<size_t> measure_cpu_header() {
  if (mx::gpu::is_available()) {
    return std::nullopt;
  }
  alloc::Data data = alloc::malloc(1);
  alloc::Buffer buffer = data.buffer();
  return static_cast<size_t>(
      reinterpret_cast<Address>(buffer.raw_ptr()) -
      reinterpret_cast<Address>(buffer.ptr()));
}

// The arrays of a file share a buffer that starts with the file and differ in
// their offsets. So the header, which holds the buffer's size, falls into the
// mapping's guard and reads as 0. Before the tensor's own data it would read as
// bytes of the file, and mx::contiguous copies arrays of too large a buffer.
std::optional<Placement> on_cpu_mapping(
    const std::shared_ptr<const Mapping>& mapping, uint64_t offset) {
  static const std::optional<size_t> header = measure_cpu_header();
  if (!header || *header > mapping->guard()) {
    return std::nullopt;
  }
  auto* start = const_cast<std::byte*>(mapping->bytes().data()) - *header;
  return Placement{
      alloc::Data(alloc::Buffer(start), [mapping](alloc::Buffer) {}), offset};
}

// Devices that can use the host's memory take whole pages of it.
std::optional<Placement> on_device_mapping(
    const std::shared_ptr<const Mapping>& mapping,
    uint64_t offset,
    uint64_t nbytes) {
  auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  uint64_t first = offset / page * page;
  uint64_t last = (offset + nbytes + page - 1) / page * page;
  auto* start = const_cast<std::byte*>(mapping->bytes().data()) + first;
  alloc::Buffer buffer = alloc::make_buffer(start, last - first);
  if (!buffer.ptr()) {
    return std::nullopt;
  }
  return Placement{
      alloc::Data(buffer, [mapping](alloc::Buffer b) { alloc::release(b); }),
      offset - first};
}

Placement copy_aligned(
    const std::byte* from, uint64_t nbytes, uint64_t alignment) {
  // MLX's CPU memory is aligned to 8 bytes, and some types need 16.
  alloc::Data data = alloc::malloc(nbytes + alignment);
  auto* to = static_cast<std::byte*>(data.buffer().raw_ptr());
  uint64_t past = reinterpret_cast<Address>(to) % alignment;
  uint64_t offset = past == 0 ? 0 : alignment - past;
  std::memcpy(to + offset, from, nbytes);
  return {std::move(data), offset};
}

// A copy in a GPU's own memory, made at once: what MLX's allocator hands out
// here is memory that host and device share, which is slower.
mx::array on_device(
    const std::byte* from, const mx::Shape& shape, mx::Dtype dtype) {
  mx::array out = mx::zeros(shape, dtype, mx::Device(mx::Device::gpu));
  out.eval();
  cuda::loaded()->upload(out, from, out.nbytes());
  return out;
}

// The same, made when it is evaluated.
class Upload : public mx::UnaryPrimitive {
 public:
  Upload(
      mx::Stream stream,
      std::shared_ptr<const File> file,
      const TensorInfo& tensor)
      : UnaryPrimitive(stream), file_(std::move(file)), tensor_(tensor) {}

  void eval_cpu(const std::vector<mx::array>&, mx::array&) override {
    throw std::runtime_error(
        "[open] Expected a tensor for the GPU to be evaluated there. Received "
        "a stream of the CPU.");
  }
  void eval_gpu(const std::vector<mx::array>&, mx::array& out) override {
    const auto& mapping = file_->mapping(tensor_.shard);
    mapping->check_length(file_->paths()[tensor_.shard]);
    const std::byte* data = mapping->bytes().data() + tensor_.offset;
    cuda::loaded()->upload_output(out, data, stream());
  }
  const char* name() const override {
    return "GGUFUpload";
  }
  bool is_equivalent(const mx::Primitive& other) const override {
    return &static_cast<const Upload&>(other).tensor_ == &tensor_;
  }

 private:
  std::shared_ptr<const File> file_;
  const TensorInfo& tensor_; // one of the file's
};

Placement place(
    const std::shared_ptr<const Mapping>& mapping, const TensorInfo& tensor) {
  const std::byte* data = mapping->bytes().data() + tensor.offset;
  auto alignment = static_cast<uint64_t>(tensor.format->alignment);
  if (reinterpret_cast<Address>(data) % alignment == 0) {
    if (auto placed = on_cpu_mapping(mapping, tensor.offset)) {
      return std::move(*placed);
    }
    if (auto placed =
            on_device_mapping(mapping, tensor.offset, tensor.nbytes)) {
      return std::move(*placed);
    }
  }
  return copy_aligned(data, tensor.nbytes, alignment);
}

} // namespace

mx::array tensor_array(
    const std::shared_ptr<const File>& file,
    const TensorInfo& tensor,
    bool later) {
  const Format& format = *tensor.format;
  if (format.packed() && !format.supported) {
    throw Error(
        ErrorKind::unsupported_type,
        "open",
        "tensor " + quoted(tensor.name) + " to have a type with kernels",
        format.name,
        file->paths()[tensor.shard]);
  }
  mx::Shape shape(tensor.shape.begin(), tensor.shape.end());
  mx::Dtype dtype = format.plain.value_or(mx::uint8);
  if (format.packed()) {
    shape.back() = static_cast<mx::ShapeElem>(format.row_bytes(shape.back()));
  }
  if (tensor.nbytes == 0) {
    return mx::array(alloc::malloc(0), std::move(shape), dtype);
  }
  const auto& mapping = file->mapping(tensor.shard);
  mapping->check_length(file->paths()[tensor.shard]);
  if (cuda::loaded() && mx::default_device() == mx::Device::gpu) {
    if (!later) {
      const std::byte* data = mapping->bytes().data();
      return on_device(data + tensor.offset, shape, dtype);
    }
    auto copy = std::make_shared<Upload>(
        mx::default_stream(mx::Device::gpu), file, tensor);
    return mx::array(std::move(shape), dtype, std::move(copy), {});
  }
  Placement placed = place(mapping, tensor);
  mx::array out(std::move(placed.data), std::move(shape), dtype);
  // The constructor has no offset; sharing the buffer with itself sets one.
  mx::Strides strides = out.strides();
  out.copy_shared_buffer(
      out,
      strides,
      out.flags(),
      out.size(),
      static_cast<int64_t>(placed.offset / dtype.size()));
  return out;
}

void release_pages(const mx::array& a) {
  if (cuda::loaded()) { // whose arrays are copies, and move when they are read
    return;
  }
  if (a.is_available() && a.flags().contiguous && a.nbytes() > 0) {
    Mapping::forget(a.data<std::byte>(), a.data_size() * a.itemsize());
  }
}

} // namespace mlx_gguf::gguf
