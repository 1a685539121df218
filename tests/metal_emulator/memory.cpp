// Memory of the emulated device. All of it lives in one reserved range: each
// buffer and threadgroup array has inaccessible pages on both sides, and a
// shadow byte per 8 bytes, in AddressSanitizer's encoding, makes its bounds
// exact.
#include "memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "runtime.h"

int mtl_flush_half;

namespace {

constexpr size_t arena_bytes = size_t(64) << 30;
constexpr size_t threadgroup_limit = 32768;
constexpr int max_sites = 64;

struct Region {
  const char* kind;
  int index;
  unsigned char* base;
  size_t size;
  // A run reuses the room of the same region of the run before.
  unsigned char* room;
  size_t room_bytes;
};

unsigned char* arena;
unsigned char* arena_end;
unsigned char* arena_next;

constexpr int max_buffers = 64;
Region buffers[max_buffers];
Region sites[max_sites];
size_t threadgroup_bytes;

struct TraceRecord {
  int64_t offset; // From the start of the region.
  uint32_t pc;    // Low half of the instruction's address.
  uint32_t threadgroup;
  uint16_t thread;
  uint16_t size;
  int16_t buffer; // Negative: threadgroup memory.
  uint16_t store;
};
TraceRecord* trace;
size_t trace_count;
size_t trace_capacity;
bool tracing;

size_t round_up(size_t value, size_t to) {
  return (value + to - 1) / to * to;
}

bool in_arena(uintptr_t address) {
  return address - reinterpret_cast<uintptr_t>(arena) < arena_bytes;
}

bool make_arena() {
  // Fixed places, so that the shadow's place is known to be free as well.
  for (uintptr_t place = 0x100000000000; place < 0x500000000000;
       place += 0x040000000000) {
    void* want = reinterpret_cast<void*>(place);
    void* got = mmap(
        want,
        arena_bytes,
        PROT_NONE,
        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
        -1,
        0);
    if (got != want) {
      if (got != MAP_FAILED) {
        munmap(got, arena_bytes);
      }
      continue;
    }
    void* shade = mtl_shadow(place);
    void* shaded = mmap(
        shade,
        arena_bytes / 8,
        PROT_READ | PROT_WRITE,
        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
        -1,
        0);
    if (shaded == shade) {
      arena = static_cast<unsigned char*>(got);
      arena_next = arena + gap_bytes;
      arena_end = arena + arena_bytes;
      return true;
    }
    if (shaded != MAP_FAILED) {
      munmap(shaded, arena_bytes / 8);
    }
    munmap(got, arena_bytes);
  }
  return false;
}

// Places `size` bytes so that their end meets the guard, except for the few
// bytes that alignment asks for; the shadow is exact about those.
unsigned char* place(
    Region& r, size_t size, size_t align, size_t misalign, bool at_start) {
  size_t need = round_up(size + align + misalign, page_bytes);
  if (r.room_bytes < need) {
    if (r.room) {
      madvise(r.room, r.room_bytes, MADV_DONTNEED);
      mprotect(r.room, r.room_bytes, PROT_NONE);
    }
    r.room = mtl_reserve(need, gap_bytes);
    r.room_bytes = r.room ? need : 0;
    if (!r.room) {
      return nullptr;
    }
  }
  // The guard must follow this run's end, not that of a larger one before.
  mprotect(r.room + need, r.room_bytes - need, PROT_NONE);
  mtl_commit(r.room, need);
  size_t room = need;
  size_t start =
      at_start ? misalign : (room - size - misalign) / align * align + misalign;
  r.base = r.room + start;
  r.size = size;
  // The guards are poisoned too: the report is then that of the shadow.
  uintptr_t first = reinterpret_cast<uintptr_t>(r.room) - page_bytes;
  memset(mtl_shadow(first), 0xfa, (r.room_bytes + 2 * page_bytes) / 8);
  mtl_unpoison(r.base, size);
  if (misalign & 7) {
    // A shadow byte cannot say "only the last bytes": `check` looks closer.
    *mtl_shadow(reinterpret_cast<uintptr_t>(r.base)) = 0xfb;
  }
  return r.base;
}

// The region in use that an address is in or next to.
const Region* nearest(uintptr_t address) {
  const Region* found = nullptr;
  uintptr_t best = gap_bytes;
  for (int i = 0; i < max_buffers + max_sites; ++i) {
    const Region& r = i < max_buffers ? buffers[i] : sites[i - max_buffers];
    uintptr_t first = reinterpret_cast<uintptr_t>(r.base);
    uintptr_t end = first + r.size;
    uintptr_t away = address < first ? first - address
                     : address < end ? 0
                                     : address - end + 1;
    if (first && away < best) {
      best = away;
      found = &r;
    }
  }
  return found;
}

bool inside(const Region* r, uintptr_t address, size_t size) {
  uintptr_t base = r ? reinterpret_cast<uintptr_t>(r->base) : 0;
  return r && address >= base && address + size <= base + r->size;
}

void record(uint64_t pc, uintptr_t address, size_t size, bool store) {
  const Region* r = nearest(address);
  if (!r) {
    return;
  }
  if (trace_count == trace_capacity) {
    trace_capacity = trace_capacity ? 2 * trace_capacity : 1 << 16;
    trace = static_cast<TraceRecord*>(
        realloc(trace, trace_capacity * sizeof(TraceRecord)));
  }
  TraceRecord& t = trace[trace_count++];
  t.offset = int64_t(address - reinterpret_cast<uintptr_t>(r->base));
  t.pc = uint32_t(pc);
  t.threadgroup = mtl_current_threadgroup();
  t.thread = uint16_t(mtl_current_thread());
  t.size = uint16_t(size);
  t.buffer = int16_t(r->kind[0] == 'b' ? r->index : -1 - r->index);
  t.store = store;
}

} // namespace

void mtl_check_access(
    uint64_t pc, uintptr_t address, size_t size, const char* what) {
  if (!in_arena(address)) {
    return; // Program-scope constants; UBSan watches their bounds.
  }
  uintptr_t last = address + size - 1;
  bool bad = false;
  for (uintptr_t granule = address >> 3; granule <= last >> 3; ++granule) {
    signed char s =
        *reinterpret_cast<signed char*>(granule + mtl_shadow_offset);
    if (s) {
      uintptr_t end = (granule << 3) + 7 < last ? (granule << 3) + 7 : last;
      bad |= s < 0 || int(end & 7) >= s;
    }
  }
  if (bad && !inside(nearest(address), address, size)) {
    mtl_report_access(pc, address, size, what);
  }
  if (tracing) {
    record(pc, address, size, what[0] == 's');
  }
}

unsigned char* mtl_reserve(size_t size, size_t gap) {
  if (!arena && !make_arena()) {
    return nullptr;
  }
  size_t take = round_up(size, page_bytes) + gap;
  if (take > size_t(arena_end - arena_next)) {
    return nullptr;
  }
  unsigned char* result = arena_next;
  arena_next += take;
  return result;
}

void mtl_commit(unsigned char* address, size_t size) {
  mprotect(address, round_up(size, page_bytes), PROT_READ | PROT_WRITE);
}

void mtl_unpoison(const unsigned char* address, size_t size) {
  uintptr_t first = reinterpret_cast<uintptr_t>(address);
  uintptr_t end = first + size;
  memset(mtl_shadow(first), 0, (end >> 3) - (first >> 3));
  if (end & 7) {
    *mtl_shadow(end) = end & 7;
  }
}

extern "C" void* mtl_threadgroup(int site, size_t size, size_t align) {
  Region& r = sites[site];
  if (!r.base) {
    threadgroup_bytes += size;
    if (threadgroup_bytes > threadgroup_limit) {
      mtl_fail_at(
          reinterpret_cast<uint64_t>(__builtin_return_address(0)),
          "Expected at most %zu bytes of threadgroup memory. Received %zu",
          threadgroup_limit,
          threadgroup_bytes);
    }
    r.kind = "threadgroup array";
    r.index = site;
    place(r, size, align < 16 ? 16 : align, 0, false);
    memset(r.base, 0xff, size);
  }
  return r.base;
}

void mtl_poison_threadgroup() {
  // All ones is a NaN in every floating-point type.
  for (Region& r : sites) {
    if (r.base) {
      memset(r.base, 0xff, r.size);
    }
  }
}

extern "C" void mtl_reset() {
  for (int i = 0; i < max_buffers + max_sites; ++i) {
    Region& r = i < max_buffers ? buffers[i] : sites[i - max_buffers];
    if (r.base) {
      // Nothing may reach what an earlier run left.
      mprotect(r.room, r.room_bytes, PROT_NONE);
      memset(
          mtl_shadow(reinterpret_cast<uintptr_t>(r.room)),
          0xfa,
          r.room_bytes / 8);
      r.base = nullptr;
    }
  }
  threadgroup_bytes = 0;
}

// Device memory for one buffer argument, holding a copy of `data`. The base is
// `misalign` past a multiple of `align`.
extern "C" void* mtl_buffer(
    int index,
    const void* data,
    size_t size,
    size_t align,
    size_t misalign,
    int at_start) {
  if (index < 0 || index >= max_buffers) {
    return nullptr;
  }
  Region& r = buffers[index];
  r.kind = "buffer";
  r.index = index;
  if (!place(r, size, align, misalign, at_start)) {
    return nullptr;
  }
  memcpy(r.base, data, size);
  return r.base;
}

// A [[threadgroup(n)]] argument; sites from the top so that they do not meet
// the declarations in kernels.
extern "C" void* mtl_threadgroup_argument(int index, size_t size) {
  threadgroup_bytes += size;
  Region& r = sites[max_sites - 1 - index];
  r.kind = "threadgroup argument";
  r.index = index;
  return threadgroup_bytes > threadgroup_limit ? nullptr
                                               : place(r, size, 16, 0, false);
}

extern "C" void mtl_trace(int on) {
  tracing = on;
  trace_count = 0;
}

extern "C" size_t mtl_trace_records(const void** records) {
  *records = trace;
  return trace_count;
}

void mtl_report_access(
    uint64_t pc, uintptr_t address, size_t size, const char* what) {
  const Region* r = nearest(address);
  char length[32] = "";
  if (size) {
    snprintf(length, sizeof length, " of %zu bytes", size);
  }
  if (!r) {
    mtl_fail_at(
        pc,
        in_arena(address) ? "Expected an access inside its variable. Received "
                            "a %s%s beyond a thread's array"
                          : "Expected an access inside a buffer. Received a "
                            "%s%s at a wild address",
        what,
        length);
  }
  mtl_fail_at(
      pc,
      "Expected an access inside %s %d of %zu bytes. Received a %s%s at offset "
      "%lld",
      r->kind,
      r->index,
      r->size,
      what,
      length,
      static_cast<long long>(address - reinterpret_cast<uintptr_t>(r->base)));
}
