// The thread pool by itself, for ThreadSanitizer: loops one after the other,
// nested, from several callers at once, with exceptions, and after a fork.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <thread>
#include <vector>

#include "cpu/threads.h"

using mlx_gguf::cpu::num_threads;
using mlx_gguf::cpu::parallel_for;

namespace {

void expect(bool right, const char* what) {
  if (!right) {
    std::fprintf(stderr, "threads_test: %s\n", what);
    std::_Exit(1);
  }
}

// Plain numbers, not atomics: a race on them is one of the pool's.
void every_index_runs_once(int64_t n) {
  std::vector<int> counts(static_cast<size_t>(n));
  parallel_for(n, [&](int64_t i) { ++counts[static_cast<size_t>(i)]; });
  for (int count : counts) {
    expect(count == 1, "an index ran another number of times than once");
  }
}

void many_loops() {
  for (int64_t n : {0, 1, 2, 3, 64, 1000}) {
    for (int i = 0; i < 200; ++i) {
      every_index_runs_once(n);
    }
  }
}

// What one loop wrote, the next one reads on other threads.
void loops_see_each_other() {
  std::vector<int64_t> values(257);
  for (int round = 0; round < 500; ++round) {
    parallel_for(257, [&](int64_t i) {
      values[static_cast<size_t>((i * 3) % 257)] += i;
    });
  }
  int64_t sum = 0;
  for (int64_t v : values) {
    sum += v;
  }
  expect(sum == 500 * 256 * 257 / 2, "a loop did not see what was written");
}

void nested_loops() {
  std::vector<int> counts(20 * 30);
  for (int round = 0; round < 50; ++round) {
    parallel_for(20, [&](int64_t i) {
      parallel_for(
          30, [&](int64_t j) { ++counts[static_cast<size_t>(i * 30 + j)]; });
    });
  }
  for (int count : counts) {
    expect(count == 50, "a nested loop lost an index");
  }
}

void callers_at_once(void (*work)()) {
  std::vector<std::thread> callers;
  for (int i = 0; i < 8; ++i) {
    callers.emplace_back([work] {
      for (int round = 0; round < 50; ++round) {
        work();
      }
    });
  }
  for (auto& caller : callers) {
    caller.join();
  }
}

void throwing_loop() {
  bool caught = false;
  try {
    parallel_for(100, [](int64_t i) {
      if (i % 7 == 3) {
        throw std::runtime_error("expected");
      }
    });
  } catch (const std::runtime_error&) {
    caught = true;
  }
  expect(caught, "an exception was lost");
  every_index_runs_once(50);
}

void forked_child() {
  std::fflush(nullptr);
  pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);
    // ThreadSanitizer lets no child of threads make threads of its own, so its
    // build of this test only sees that the child is left alone.
#if !defined(__SANITIZE_THREAD__)
    expect(num_threads() == 4, "another number of threads after a fork");
    many_loops();
    throwing_loop();
#endif
    std::_Exit(0);
  }
  int status = 1;
  expect(::waitpid(child, &status, 0) == child && status == 0, "the fork");
  many_loops();
}

} // namespace

int main() {
  ::setenv("MLX_GGUF_NUM_THREADS", "4", 1);
  expect(num_threads() == 4, "another number of threads than asked for");
  many_loops();
  loops_see_each_other();
  nested_loops();
  callers_at_once([] { every_index_runs_once(40); });
  callers_at_once(throwing_loop);
  callers_at_once([] {
    std::atomic<int> count = 0;
    parallel_for(
        8, [&](int64_t) { parallel_for(8, [&](int64_t) { ++count; }); });
    expect(count == 64, "callers at once, nested");
  });
  throwing_loop();
  forked_child();
  std::puts("threads_test: passed");
  return 0;
}
