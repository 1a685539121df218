// Switches between stacks, and processor faults while kernels run.
#pragma once
#include <signal.h>
#include <stdint.h>

// Continues at `load`, what an earlier switch or `mtl_new_context` left, and
// stores in `save` what will continue here.
extern "C" void mtl_switch(void** save, void* load);

// A stack that ends at `top` and starts in `entry`.
void* mtl_new_context(unsigned char* top, void (*entry)());

bool mtl_is_stack(uintptr_t address);

// While one lives, faults are reported as errors of the kernel.
class FaultHandler {
 public:
  FaultHandler();
  ~FaultHandler();

 private:
  stack_t old_stack_;
  struct sigaction old_segv_, old_bus_, old_fpe_;
};
