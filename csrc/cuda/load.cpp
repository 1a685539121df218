#include <atomic>
#include <mutex>
#include <stdexcept>
#include <string>

#include "cuda/backend.h"
#ifndef _WIN32
#include <dlfcn.h>
#endif

namespace mlx_gguf::cuda {

namespace {

std::atomic<const Backend*> backend{nullptr};

} // namespace

void load(const std::string& path) {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  if (backend.load()) {
    return;
  }
  void* object = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  void* entry = object ? dlsym(object, entry_name) : nullptr;
  if (!entry) {
    const char* reason = dlerror();
    throw std::runtime_error(
        "[load_cuda] Expected the CUDA backend of this package in " + path +
        ". Received: " + (reason ? reason : "no reason") + ".");
  }
  backend = reinterpret_cast<Entry>(entry)();
}

const Backend* loaded() {
  return backend.load(std::memory_order_acquire);
}

} // namespace mlx_gguf::cuda
