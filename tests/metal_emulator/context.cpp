#include "context.h"

#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include "memory.h"

// Saves what the calling convention says a call preserves; nothing else of a
// lane is live across a switch.
#if defined(__x86_64__)
asm(R"(
.text
.globl mtl_switch
.hidden mtl_switch
mtl_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
constexpr size_t switch_frame = 7 * 8;
// A function entry expects the stack 8 bytes off alignment.
constexpr size_t entry_offset = 8;
constexpr size_t return_slot = 6;
#elif defined(__aarch64__)
asm(R"(
.text
.globl mtl_switch
.hidden mtl_switch
mtl_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
constexpr size_t switch_frame = 160;
constexpr size_t entry_offset = 0;
constexpr size_t return_slot = 11;
#else
#error "The Metal emulator runs on x86-64 and AArch64."
#endif

void* mtl_new_context(unsigned char* top, void (*entry)()) {
  uintptr_t aligned = reinterpret_cast<uintptr_t>(top) & ~uintptr_t(63);
  void** frame =
      reinterpret_cast<void**>(aligned - entry_offset - switch_frame);
  memset(frame, 0, switch_frame);
  frame[return_slot] = reinterpret_cast<void*>(entry);
  return frame;
}

namespace {

void on_fault(int signal, siginfo_t* info, void* context) {
  uint64_t pc = 0;
#if defined(__x86_64__)
  pc = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP];
#elif defined(__aarch64__)
  pc = static_cast<ucontext_t*>(context)->uc_mcontext.pc;
#endif
  if (signal == SIGFPE) {
    mtl_fail_at(pc, "Expected no integer division by zero");
  }
  uintptr_t address = reinterpret_cast<uintptr_t>(info->si_addr);
  if (mtl_is_stack(address)) {
    mtl_fail_at(pc, "Expected a lane to need less stack");
  }
  mtl_report_access(pc, address, 0, "access");
}

} // namespace

FaultHandler::FaultHandler() {
  static unsigned char* alternate =
      static_cast<unsigned char*>(malloc(64 << 10));
  stack_t stack{};
  stack.ss_sp = alternate;
  stack.ss_size = 64 << 10;
  sigaltstack(&stack, &old_stack_);
  struct sigaction action{};
  action.sa_sigaction = on_fault;
  // The handler leaves by a stack switch, so the signal must not stay blocked.
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigaction(SIGSEGV, &action, &old_segv_);
  sigaction(SIGBUS, &action, &old_bus_);
  sigaction(SIGFPE, &action, &old_fpe_);
}

FaultHandler::~FaultHandler() {
  sigaction(SIGSEGV, &old_segv_, nullptr);
  sigaction(SIGBUS, &old_bus_, nullptr);
  sigaction(SIGFPE, &old_fpe_, nullptr);
  sigaltstack(&old_stack_, nullptr);
}
