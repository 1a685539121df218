// Guarded memory, its shadow, and the reports about both.
#pragma once
#include <stddef.h>
#include <stdint.h>

constexpr size_t page_bytes = 4096;
// Inaccessible memory around every buffer: an index that is far out still lands
// there and not in another buffer.
constexpr size_t gap_bytes = size_t(64) << 20;

// Must match -asan-mapping-offset in build.py.
constexpr uintptr_t mtl_shadow_offset = 0x7fff8000;
inline unsigned char* mtl_shadow(uintptr_t address) {
  return reinterpret_cast<unsigned char*>((address >> 3) + mtl_shadow_offset);
}

extern int mtl_flush_half; // Half subnormals become zero.

// Address space for `size` bytes inside the arena, page-aligned, inaccessible,
// and at least `gap` bytes of such memory after it.
unsigned char* mtl_reserve(size_t size, size_t gap);
void mtl_commit(unsigned char* address, size_t size);
void mtl_unpoison(const unsigned char* address, size_t size);
void mtl_poison_threadgroup();

int mtl_current_thread();
uint32_t mtl_current_threadgroup();

[[noreturn]] void mtl_fail_at(uint64_t pc, const char* format, ...);
[[noreturn]] void mtl_report_access(
    uint64_t pc, uintptr_t address, size_t size, const char* what);

// Fails unless the shadow allows the access; records it while tracing.
void mtl_check_access(
    uint64_t pc, uintptr_t address, size_t size, const char* what);
