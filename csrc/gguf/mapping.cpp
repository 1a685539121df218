#include "gguf/mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <limits>
#include <map>
#include <mutex>

#include "gguf/error.h"

namespace mlx_gguf::gguf {

namespace {

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (fd_ >= 0) {
      ::close(fd_);
    }
  }
  int get() const {
    return fd_;
  }

 private:
  int fd_;
};

[[noreturn]] void os_failure(const std::string& path, int code) {
  throw Error("a readable file", path, code);
}

const char* kind_of(mode_t mode) {
  return S_ISDIR(mode)    ? "a directory"
         : S_ISFIFO(mode) ? "a FIFO"
         : S_ISCHR(mode)  ? "a character device"
         : S_ISBLK(mode)  ? "a block device"
         : S_ISSOCK(mode) ? "a socket"
                          : "a special file";
}

void read_all(int fd, std::byte* to, size_t size, const std::string& path) {
  // Linux reads at most 2^31 - 4096 bytes a call, macOS 2^31 - 1.
  constexpr size_t most = size_t{1} << 30;
  for (size_t done = 0; done < size;) {
    ssize_t n = ::pread(
        fd, to + done, std::min(most, size - done), static_cast<off_t>(done));
    if (n < 0 && errno == EINTR) {
      continue;
    }
    if (n < 0) {
      os_failure(path, errno);
    }
    if (n == 0) {
      throw Error(
          ErrorKind::truncated,
          "open",
          std::to_string(size) + " bytes",
          std::to_string(done) + " bytes: the file shrank while it was read",
          path);
    }
    done += static_cast<size_t>(n);
  }
}

// The files that are mapped now, by the address of their first byte: what
// forget may touch. Never destroyed, as arrays may outlive statics.
struct Mapped {
  std::mutex mutex;
  std::map<const std::byte*, size_t> sizes;
};

Mapped& mapped() {
  static auto* files = new Mapped;
  return *files;
}

} // namespace

Mapping::Mapping(void* base, size_t guard, size_t size)
    : base_(base),
      guard_(guard),
      data_(static_cast<std::byte*>(base) + guard),
      size_(size) {}

Mapping::~Mapping() {
  {
    Mapped& files = mapped();
    std::lock_guard lock(files.mutex);
    files.sizes.erase(data_);
  }
  ::munmap(base_, guard_ + size_);
}

void Mapping::check_length(const std::string& path) const {
  struct stat info;
  if (inode_ != 0 && ::stat(path.c_str(), &info) == 0 &&
      static_cast<uint64_t>(info.st_dev) == device_ &&
      static_cast<uint64_t>(info.st_ino) == inode_ &&
      static_cast<uint64_t>(info.st_size) < size_) {
    throw Error(
        ErrorKind::truncated,
        "open",
        "the " + std::to_string(size_) + " bytes that were there at opening",
        std::to_string(info.st_size) + " bytes: the file was shortened",
        path);
  }
}

void Mapping::forget(const std::byte* begin, size_t size) {
  Mapped& files = mapped();
  std::lock_guard lock(files.mutex); // held, so that the file stays mapped
  auto after = files.sizes.upper_bound(begin);
  if (after == files.sizes.begin()) {
    return;
  }
  auto [data, length] = *std::prev(after);
  auto offset = static_cast<size_t>(begin - data);
  if (offset > length || size > length - offset) {
    return;
  }
  auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  size_t first = (offset + page - 1) / page * page;
  size_t last = (offset + size) / page * page;
  if (first < last) { // a hint: that it fails changes no result
    ::madvise(
        const_cast<std::byte*>(data) + first, last - first, MADV_DONTNEED);
  }
}

std::shared_ptr<const Mapping> Mapping::open(
    const std::string& path, bool copy) {
  if (path.find('\0') != std::string::npos) {
    os_failure(path, EINVAL);
  }
  // O_NONBLOCK: opening a FIFO without a writer would wait for one.
  Descriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat info;
  if (fd.get() < 0 || ::fstat(fd.get(), &info) != 0) {
    os_failure(path, errno);
  }
  if (!S_ISREG(info.st_mode)) {
    throw Error(
        ErrorKind::not_gguf,
        "open",
        "a regular file",
        kind_of(info.st_mode),
        path);
  }
  if (info.st_size <= 0) {
    throw Error(
        ErrorKind::truncated, "open", "a GGUF header", "an empty file", path);
  }
  auto guard = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  auto size = static_cast<uint64_t>(info.st_size);
  if (size > std::numeric_limits<size_t>::max() - guard) {
    os_failure(path, EFBIG);
  }

  // One reservation for guard and file; the file then takes its part over.
  auto total = guard + static_cast<size_t>(size);
  void* base = ::mmap(
      nullptr,
      total,
      copy ? PROT_READ | PROT_WRITE : PROT_READ,
      MAP_PRIVATE | MAP_ANON,
      -1,
      0);
  if (base == MAP_FAILED) {
    os_failure(path, errno);
  }
  std::shared_ptr<Mapping> mapping(
      new Mapping(base, guard, static_cast<size_t>(size)));
  if (copy) {
    read_all(fd.get(), mapping->data_, mapping->size_, path);
    if (::mprotect(base, total, PROT_READ) != 0) {
      os_failure(path, errno);
    }
  } else if (
      ::mmap(
          mapping->data_,
          mapping->size_,
          PROT_READ,
          MAP_SHARED | MAP_FIXED,
          fd.get(),
          0) == MAP_FAILED) {
    os_failure(path, errno);
  }
  if (!copy) {
    mapping->device_ = static_cast<uint64_t>(info.st_dev);
    mapping->inode_ = static_cast<uint64_t>(info.st_ino);
    Mapped& files = mapped();
    std::lock_guard lock(files.mutex);
    files.sizes.emplace(mapping->data_, mapping->size_);
  }
  return mapping;
}

} // namespace mlx_gguf::gguf
