// What code instrumented by AddressSanitizer calls.
#include <string.h>

#include "memory.h"

#define PC reinterpret_cast<uint64_t>(__builtin_return_address(0))
#define ACCESS(size)                                       \
  extern "C" void __asan_load##size(uintptr_t p) {         \
    mtl_check_access(PC, p, size, "load");                 \
  }                                                        \
  extern "C" void __asan_store##size(uintptr_t p) {        \
    mtl_check_access(PC, p, size, "store");                \
  }                                                        \
  extern "C" void __asan_report_load##size(uintptr_t p) {  \
    mtl_report_access(PC, p, size, "load");                \
  }                                                        \
  extern "C" void __asan_report_store##size(uintptr_t p) { \
    mtl_report_access(PC, p, size, "store");               \
  }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)

extern "C" {
void __asan_loadN(uintptr_t p, size_t size) {
  mtl_check_access(PC, p, size, "load");
}
void __asan_storeN(uintptr_t p, size_t size) {
  mtl_check_access(PC, p, size, "store");
}
void __asan_report_load_n(uintptr_t p, size_t size) {
  mtl_report_access(PC, p, size, "load");
}
void __asan_report_store_n(uintptr_t p, size_t size) {
  mtl_report_access(PC, p, size, "store");
}
void* __asan_memcpy(void* to, const void* from, size_t size) {
  if (size) {
    mtl_check_access(PC, reinterpret_cast<uintptr_t>(from), size, "load");
    mtl_check_access(PC, reinterpret_cast<uintptr_t>(to), size, "store");
  }
  return memcpy(to, from, size);
}
void* __asan_memmove(void* to, const void* from, size_t size) {
  if (size) {
    mtl_check_access(PC, reinterpret_cast<uintptr_t>(from), size, "load");
    mtl_check_access(PC, reinterpret_cast<uintptr_t>(to), size, "store");
  }
  return memmove(to, from, size);
}
void* __asan_memset(void* to, int value, size_t size) {
  if (size) {
    mtl_check_access(PC, reinterpret_cast<uintptr_t>(to), size, "store");
  }
  return memset(to, value, size);
}
void __asan_poison_stack_memory(uintptr_t p, size_t size) {
  memset(mtl_shadow(p), 0xf8, (size + 7) / 8);
}
void __asan_unpoison_stack_memory(uintptr_t p, size_t size) {
  mtl_unpoison(reinterpret_cast<unsigned char*>(p), size);
}
#define SET_SHADOW(value)                                    \
  void __asan_set_shadow_##value(uintptr_t p, size_t size) { \
    memset(reinterpret_cast<void*>(p), 0x##value, size);     \
  }
SET_SHADOW(00)
SET_SHADOW(01)
SET_SHADOW(02)
SET_SHADOW(03)
SET_SHADOW(04)
SET_SHADOW(05)
SET_SHADOW(06)
SET_SHADOW(07)
SET_SHADOW(f1)
SET_SHADOW(f2)
SET_SHADOW(f3)
SET_SHADOW(f5)
SET_SHADOW(f8)
void __asan_handle_no_return() {}
void __asan_init() {}
void __asan_version_mismatch_check_v8() {}
}
