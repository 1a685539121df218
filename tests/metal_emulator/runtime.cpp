// Runs a kernel's threadgroups: schedules its lanes and reports its errors. One
// threadgroup runs at a time and every lane has a stack of its own; a lane
// gives the processor away only at collectives, barriers and its end.
#include "runtime.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "context.h"
#include "memory.h"

namespace {

constexpr int max_lanes = 1024;
constexpr int simd_width = 32;
constexpr int max_simdgroups = max_lanes / simd_width;
constexpr size_t stack_bytes = 256 << 10;
// Stacks start at staggered addresses so that they do not share cache sets.
constexpr size_t stack_stagger = 1088;

enum State : uint8_t { runnable, in_exchange, in_barrier, finished };

struct Fiber {
  void* sp;
  MtlLane lane;
  State state;
  const char* op;
  MtlSite site;
};

struct Simdgroup {
  uint32_t ready; // Bit per lane that can run.
  uint32_t lanes;
  uint32_t generation;
  // Two generations, as a fast lane may post its next value before a slow one
  // has read the last.
  alignas(32) unsigned char slots[2][simd_width * mtl_slot_bytes];
};

using Launcher = void (*)(void* const*);

Fiber fibers[max_lanes];
Simdgroup simdgroups[max_simdgroups];
int order[simd_width]; // Lane that runs at each turn.
int turn_of[simd_width];
Fiber* current;
Simdgroup* group;
void* main_sp;
unsigned char* stacks;
Launcher launcher;
void* const* launch_slots;
const char* kernel_name = "";
const void* const* function_constants;
int function_constant_count;
char error_text[2048];
uint64_t error_pc;
bool failed;
bool running;

} // namespace

extern "C" {
const MtlLane* mtl_lane;
void mtl_fiber_entry();
}

namespace {

[[noreturn]] void leave_to_main() {
  static void* discarded;
  mtl_switch(&discarded, main_sp);
  __builtin_unreachable();
}

void where(char* out, size_t size, const Fiber& f) {
  const uint32_t* g = f.lane.threadgroup_position_in_grid;
  snprintf(
      out,
      size,
      "threadgroup (%u, %u, %u) simdgroup %u lane %u",
      g[0],
      g[1],
      g[2],
      f.lane.simdgroup_index_in_threadgroup,
      f.lane.thread_index_in_simdgroup);
}

void describe(char* out, size_t size, const Fiber& f) {
  if (f.state == finished) {
    snprintf(
        out,
        size,
        "lane %u of simdgroup %u has returned",
        f.lane.thread_index_in_simdgroup,
        f.lane.simdgroup_index_in_threadgroup);
  } else {
    snprintf(
        out,
        size,
        "lane %u of simdgroup %u is at %s (%s:%d:%d)",
        f.lane.thread_index_in_simdgroup,
        f.lane.simdgroup_index_in_threadgroup,
        f.op,
        f.site.file,
        f.site.line,
        f.site.column);
  }
}

[[noreturn]] void fail_divergent(const Fiber& a, const Fiber& b) {
  char first[512], second[512];
  describe(first, sizeof first, a);
  describe(second, sizeof second, b);
  snprintf(
      error_text,
      sizeof error_text,
      "[%s] Expected every lane at the same collective. Received: %s while %s.",
      kernel_name,
      first,
      second);
  error_pc = 0;
  failed = true;
  leave_to_main();
}

bool same_place(const Fiber& a, const Fiber& b) {
  return a.state == b.state && a.op == b.op && a.site.line == b.site.line &&
         a.site.column == b.site.column && !strcmp(a.site.file, b.site.file);
}

Fiber* lane_of(const Simdgroup& g, int lane) {
  return &fibers[(&g - simdgroups) * simd_width + lane];
}

void run_lane(Fiber* next) {
  Fiber* previous = current;
  current = next;
  mtl_lane = &next->lane;
  mtl_switch(&previous->sp, next->sp);
}

// Called by a lane that has just stopped being able to run. Gives way to the
// next lane in turn; the last lane to stop decides what happens to all.
void give_way() {
  Simdgroup& g = *group;
  if (g.ready) {
    int turn = turn_of[current->lane.thread_index_in_simdgroup];
    uint32_t later = g.ready & ~((2u << turn) - 1);
    run_lane(lane_of(g, order[__builtin_ctz(later ? later : g.ready)]));
    return;
  }
  const Fiber& first = *lane_of(g, 0);
  for (uint32_t i = 1; i < g.lanes; ++i) {
    const Fiber& other = *lane_of(g, i);
    bool ended = first.state == finished && other.state == finished;
    if (!ended && !same_place(first, other)) {
      fail_divergent(first, other);
    }
  }
  if (first.state != in_exchange) {
    // The whole simdgroup waits at a barrier or has ended.
    mtl_switch(&current->sp, main_sp);
    return;
  }
  for (uint32_t i = 0; i < g.lanes; ++i) {
    lane_of(g, i)->state = runnable;
    g.ready |= 1u << turn_of[i];
  }
  ++g.generation;
}

void stop(State state, const char* op, MtlSite site) {
  current->state = state;
  current->op = op;
  current->site = site;
  group->ready &= ~(1u << turn_of[current->lane.thread_index_in_simdgroup]);
  give_way();
}

void prepare(Fiber& f, int index) {
  unsigned char* top = stacks + (index + 1) * (stack_bytes + page_bytes) -
                       (index % 61) * stack_stagger;
  f.sp = mtl_new_context(top, mtl_fiber_entry);
  f.state = runnable;
}

void run_simdgroup(Simdgroup& g) {
  group = &g;
  Fiber* first = nullptr;
  g.ready = 0;
  for (uint32_t i = 0; i < g.lanes; ++i) {
    Fiber* f = lane_of(g, i);
    f->state = runnable;
    g.ready |= 1u << turn_of[i];
  }
  first = lane_of(g, order[__builtin_ctz(g.ready)]);
  current = first;
  mtl_lane = &first->lane;
  mtl_switch(&main_sp, first->sp);
}

// Runs the prepared threadgroup to its end.
bool run_threadgroup(int simdgroup_count, bool reverse) {
  for (;;) {
    for (int i = 0; i < simdgroup_count; ++i) {
      run_simdgroup(simdgroups[reverse ? simdgroup_count - 1 - i : i]);
      if (failed) {
        return false;
      }
    }
    const Fiber& first = fibers[0];
    for (int i = 1; i < simdgroup_count; ++i) {
      const Fiber& other = fibers[i * simd_width];
      bool ended = first.state == finished && other.state == finished;
      if (!ended && !same_place(first, other)) {
        char a[512], b[512];
        describe(a, sizeof a, first);
        describe(b, sizeof b, other);
        snprintf(
            error_text,
            sizeof error_text,
            "[%s] Expected every lane at the same collective. Received: %s "
            "while %s.",
            kernel_name,
            a,
            b);
        failed = true;
        return false;
      }
    }
    if (first.state == finished) {
      return true;
    }
  }
}

} // namespace

// --- Called by kernels ---

void mtl_fiber_entry() {
  launcher(launch_slots);
  stop(finished, "end", MtlSite{"", 0, 0});
  __builtin_unreachable();
}

const unsigned char* mtl_exchange(
    const char* op, MtlSite site, const void* value, size_t size) {
  Simdgroup& g = *group;
  unsigned char* slots = g.slots[g.generation & 1];
  memcpy(
      slots + current->lane.thread_index_in_simdgroup * mtl_slot_bytes,
      value,
      size);
  stop(in_exchange, op, site);
  return slots;
}

void mtl_barrier(const char* op, MtlSite site) {
  stop(in_barrier, op, site);
}

const void* mtl_function_constant(int index) {
  if (index < function_constant_count && function_constants[index]) {
    return function_constants[index];
  }
  mtl_fail("Expected a value for a function constant", MtlSite{"", index, 0});
}

void mtl_fail(const char* text, MtlSite site) {
  mtl_fail_at(0, "%s (%s:%d:%d)", text, site.file, site.line, site.column);
}

void mtl_fail_at(uint64_t pc, const char* format, ...) {
  char text[1024], place[128];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  if (!running) {
    fprintf(stderr, "Metal emulator: %s\n", text);
    abort();
  }
  where(place, sizeof place, *current);
  snprintf(
      error_text, sizeof error_text, "[%s] %s, %s", kernel_name, text, place);
  error_pc = pc;
  failed = true;
  leave_to_main();
}

int mtl_current_thread() {
  return current ? current->lane.thread_index_in_threadgroup : 0;
}

uint32_t mtl_current_threadgroup() {
  const MtlLane& l = *mtl_lane;
  const uint32_t* p = l.threadgroup_position_in_grid;
  const uint32_t* n = l.threadgroups_per_grid;
  return (p[2] * n[1] + p[1]) * n[0] + p[0];
}

bool mtl_is_stack(uintptr_t address) {
  uintptr_t base = reinterpret_cast<uintptr_t>(stacks);
  return address - base < max_lanes * (stack_bytes + page_bytes) + page_bytes;
}

// --- Called by the Python driver ---

struct MtlLaunch {
  void (*entry)(void* const*);
  const char* name;
  void* const* slots;
  const void* const* constants;
  int32_t constant_count;
  uint32_t grid[3];
  uint32_t threads[3];
  int32_t reverse;
  int32_t flush_half;
};

extern "C" int mtl_run(const MtlLaunch* launch) {
  const uint32_t* grid = launch->grid;
  const uint32_t* threads = launch->threads;
  uint32_t count = threads[0] * threads[1] * threads[2];
  int simdgroup_count = (count + simd_width - 1) / simd_width;
  if (!stacks) {
    stacks = mtl_reserve(
        max_lanes * (stack_bytes + page_bytes) + page_bytes, gap_bytes);
    for (int i = 0; stacks && i < max_lanes; ++i) {
      mtl_commit(
          stacks + i * (stack_bytes + page_bytes) + page_bytes, stack_bytes);
    }
    if (!stacks) {
      snprintf(error_text, sizeof error_text, "No memory for the stacks.");
      return 1;
    }
  }
  launcher = launch->entry;
  launch_slots = launch->slots;
  kernel_name = launch->name;
  function_constants = launch->constants;
  function_constant_count = launch->constant_count;
  mtl_flush_half = launch->flush_half;
  failed = false;
  error_text[0] = 0;
  error_pc = 0;
  for (int i = 0; i < simd_width; ++i) {
    order[i] = launch->reverse ? simd_width - 1 - i : i;
    turn_of[order[i]] = i;
  }
  for (uint32_t i = 0; i < count; ++i) {
    MtlLane& l = fibers[i].lane;
    l.thread_position_in_threadgroup[0] = i % threads[0];
    l.thread_position_in_threadgroup[1] = i / threads[0] % threads[1];
    l.thread_position_in_threadgroup[2] = i / threads[0] / threads[1];
    for (int d = 0; d < 3; ++d) {
      l.threads_per_threadgroup[d] = threads[d];
      l.threadgroups_per_grid[d] = grid[d];
      l.threads_per_grid[d] = grid[d] * threads[d];
    }
    l.thread_index_in_threadgroup = i;
    l.thread_index_in_simdgroup = i % simd_width;
    l.simdgroup_index_in_threadgroup = i / simd_width;
    l.simdgroups_per_threadgroup = simdgroup_count;
    uint32_t left = count - i / simd_width * simd_width;
    l.lanes = left < simd_width ? left : simd_width;
  }
  FaultHandler handler;
  running = true;
  for (uint32_t z = 0; z < grid[2] && !failed; ++z) {
    for (uint32_t y = 0; y < grid[1] && !failed; ++y) {
      for (uint32_t x = 0; x < grid[0] && !failed; ++x) {
        for (uint32_t i = 0; i < count; ++i) {
          MtlLane& l = fibers[i].lane;
          const uint32_t position[3] = {x, y, z};
          for (int d = 0; d < 3; ++d) {
            l.threadgroup_position_in_grid[d] = position[d];
            l.thread_position_in_grid[d] =
                position[d] * threads[d] + l.thread_position_in_threadgroup[d];
          }
          prepare(fibers[i], i);
        }
        for (int i = 0; i < simdgroup_count; ++i) {
          Simdgroup& g = simdgroups[i];
          g.lanes = fibers[i * simd_width].lane.lanes;
          g.generation = 0;
          if (g.lanes < simd_width) {
            memset(g.slots, 0xff, sizeof g.slots);
          }
        }
        mtl_poison_threadgroup();
        run_threadgroup(simdgroup_count, launch->reverse);
      }
    }
  }
  running = false;
  if (failed) {
    // Lanes that were abandoned leave red zones behind on their stacks.
    mtl_unpoison(stacks, count * (stack_bytes + page_bytes) + page_bytes);
  }
  return failed;
}

extern "C" const char* mtl_error() {
  return error_text;
}

extern "C" uint64_t mtl_error_pc() {
  return error_pc;
}
