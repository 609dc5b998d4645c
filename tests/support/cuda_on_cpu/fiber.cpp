// SPDX-License-Identifier: Apache-2.0
// glibc's check of longjmp() takes a jump to another stack for an error.
#undef _FORTIFY_SOURCE
#include "tests/support/cuda_on_cpu/fiber.h"

#include <ucontext.h>

#include <utility>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

// A stack is entered by setcontext(). From then on setjmp() and longjmp() switch stacks, as swapcontext() would call
// the kernel of the operating system each time.
namespace cuda_on_cpu {
namespace {

constexpr size_t kStackBytes = 256 * 1024;

Fiber* running = nullptr;

// AddressSanitizer has to know on which stack it is.
class StackSwitch {
 public:
  StackSwitch([[maybe_unused]] const void* stack, [[maybe_unused]] size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&fakeStack_, stack, bytes);
#endif
  }

  // On the stack that the switch began from.
  void isBack() const { arrive(fakeStack_); }

  // The resumer's stack is the one that a switch came from.
  static void arrive([[maybe_unused]] void* fakeStack) {
#if defined(__SANITIZE_ADDRESS__)
    const bool isInFiber = running != nullptr;
    __sanitizer_finish_switch_fiber(fakeStack, isInFiber ? &resumersStack : nullptr,
                                    isInFiber ? &resumersBytes : nullptr);
#endif
  }

  static StackSwitch toResumer() { return {resumersStack, resumersBytes}; }

 private:
  inline static const void* resumersStack = nullptr;
  inline static size_t resumersBytes = 0;
  void* fakeStack_ = nullptr;
};

}  // namespace

Fiber::Fiber(std::function<void()> body) : body_(std::move(body)), stack_(new std::byte[kStackBytes]) {}

void Fiber::enter() {
  StackSwitch::arrive(nullptr);
  for (;;) {
    running->body_();
    yield();
  }
}

void Fiber::resume() {
  running = this;
  const StackSwitch toFiber(stack_.get(), kStackBytes);
  if (_setjmp(resumer_) == 0) {
    if (isStarted_) _longjmp(here_, 1);
    isStarted_ = true;
    ucontext_t start;
    getcontext(&start);
    start.uc_stack.ss_sp = stack_.get();
    start.uc_stack.ss_size = kStackBytes;
    start.uc_link = nullptr;
    makecontext(&start, enter, 0);
    setcontext(&start);
  }
  running = nullptr;
  toFiber.isBack();
}

void Fiber::yield() {
  Fiber& self = *running;
  const StackSwitch toResumer = StackSwitch::toResumer();
  if (_setjmp(self.here_) == 0) _longjmp(self.resumer_, 1);
  toResumer.isBack();
}

}  // namespace cuda_on_cpu
