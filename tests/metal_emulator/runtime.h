// The interface between the emulator's run-time library and compiled kernels.
#pragma once
#include <stddef.h>
#include <stdint.h>

// What a lane knows about itself: the sources of Metal's built-in arguments.
struct MtlLane {
  uint32_t thread_position_in_grid[3];
  uint32_t thread_position_in_threadgroup[3];
  uint32_t threadgroup_position_in_grid[3];
  uint32_t threads_per_threadgroup[3];
  uint32_t threadgroups_per_grid[3];
  uint32_t threads_per_grid[3];
  uint32_t thread_index_in_threadgroup;
  uint32_t thread_index_in_simdgroup;
  uint32_t simdgroup_index_in_threadgroup;
  uint32_t simdgroups_per_threadgroup;
  uint32_t lanes; // Lanes of this simdgroup; less than 32 only in the last.
};

struct MtlSite {
  const char* file;
  int line;
  int column;
};

// Bytes between two lanes' values in an exchange.
enum { mtl_slot_bytes = 32 };

extern "C" {
extern const MtlLane* mtl_lane;

// Posts `size` bytes, waits for the whole simdgroup and returns the values of
// all lanes, `mtl_slot_bytes` apart; they stay until the next but one exchange.
const unsigned char* mtl_exchange(
    const char* op, MtlSite site, const void* value, size_t size);
void mtl_barrier(const char* op, MtlSite site);
void* mtl_threadgroup(int site, size_t size, size_t align);
const void* mtl_function_constant(int index);
void mtl_fail(const char* text, MtlSite site) __attribute__((noreturn));
}
