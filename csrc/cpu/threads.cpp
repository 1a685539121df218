#include "cpu/threads.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#ifdef __linux__
#include <sched.h>
#endif

namespace mlx_gguf::cpu {

namespace {

int usable_processors() {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    return std::max(1, CPU_COUNT(&set));
  }
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

int wanted_threads() {
  if (const char* text = std::getenv("MLX_GGUF_NUM_THREADS")) {
    char* end = nullptr;
    long n = std::strtol(text, &end, 10);
    if (end != text && *end == '\0' && n >= 1 && n <= 1024) {
      return static_cast<int>(n);
    }
  }
  return usable_processors();
}

// Tells the processor that this thread only waits: the other one of its core,
// where there is one, has work to do.
void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Looks for work before a worker sleeps, and for the end of a loop before its
// caller does. A decoding model starts its next product within microseconds of
// the last; after the first looks others may have the processor in between.
constexpr int busy_looks = 200;
constexpr int looks = 600;

// True if `ready` becomes so within some tens of microseconds.
template <typename F>
bool soon(F ready) {
  for (int look = 0; look < looks; ++look) {
    if (ready()) {
      return true;
    }
    look < busy_looks ? pause() : std::this_thread::yield();
  }
  return false;
}

// One loop at a time; its indices are handed out one by one.
class Pool {
 public:
  explicit Pool(int threads) : threads_(threads) {
    for (int i = 1; i < threads; ++i) {
      std::thread([this] { work(); }).detach();
    }
  }

  int threads() const {
    return threads_;
  }

  void run(int64_t n, const std::function<void(int64_t)>& body) {
    body_ = &body;
    size_ = n;
    next_.store(0, std::memory_order_relaxed);
    running_.store(threads_ - 1, std::memory_order_relaxed);
    loop_.fetch_add(1); // publishes the above
    if (sleeping_.load() > 0) {
      // Whoever counted itself before this lock now waits, and is woken.
      std::lock_guard lock(mutex_);
      wake_.notify_all();
    }
    drain();
    auto done = [this] { return running_.load() == 0; };
    if (!soon(done)) {
      std::unique_lock lock(mutex_);
      caller_sleeps_.store(true);
      done_.wait(lock, done);
      caller_sleeps_.store(false);
    }
    if (error_) {
      std::rethrow_exception(std::exchange(error_, nullptr));
    }
  }

  std::mutex busy; // held by the thread whose loop runs

 private:
  void drain() {
    try {
      for (;;) {
        int64_t i = next_.fetch_add(1, std::memory_order_relaxed);
        if (i >= size_) {
          return;
        }
        (*body_)(i);
      }
    } catch (...) {
      next_.store(size_, std::memory_order_relaxed);
      std::lock_guard lock(mutex_);
      if (!error_) {
        error_ = std::current_exception();
      }
    }
  }

  void work() {
    uint64_t seen = 0;
    auto started = [&] { return loop_.load() != seen; };
    for (;;) {
      if (!soon(started)) {
        std::unique_lock lock(mutex_);
        sleeping_.fetch_add(1);
        wake_.wait(lock, started);
        sleeping_.fetch_sub(1);
      }
      ++seen; // a loop ends only when every worker has seen it
      drain();
      if (running_.fetch_sub(1) == 1 && caller_sleeps_.load()) {
        std::lock_guard lock(mutex_);
        done_.notify_one();
      }
    }
  }

  const int threads_;
  std::mutex mutex_; // of what sleeps, and of error_
  std::condition_variable wake_;
  std::condition_variable done_;
  std::atomic<uint64_t> loop_{0};
  std::atomic<int> sleeping_{0};
  std::atomic<bool> caller_sleeps_{false};
  std::atomic<int64_t> next_{0};
  std::atomic<int> running_{0};
  const std::function<void(int64_t)>* body_ = nullptr;
  int64_t size_ = 0;
  std::exception_ptr error_;
};

std::atomic<Pool*> the_pool{nullptr};
std::mutex making;

// Never destroyed: MLX's stream threads may still run while statics die. A
// forked child has none of its parent's threads and makes a pool of its own.
Pool& pool() {
  Pool* p = the_pool.load(std::memory_order_acquire);
  if (!p) {
    std::lock_guard lock(making);
    p = the_pool.load();
    if (!p) {
      static std::once_flag once;
      std::call_once(once, [] {
        pthread_atfork(nullptr, nullptr, [] { the_pool.store(nullptr); });
      });
      p = new Pool(wanted_threads());
      the_pool.store(p, std::memory_order_release);
    }
  }
  return *p;
}

} // namespace

int num_threads() {
  return pool().threads();
}

void parallel_for(int64_t n, const std::function<void(int64_t)>& body) {
  if (n > 1) {
    Pool& p = pool();
    std::unique_lock lock(p.busy, std::try_to_lock);
    if (lock && p.threads() > 1) {
      p.run(n, body);
      return;
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    body(i);
  }
}

} // namespace mlx_gguf::cpu
