// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <csetjmp>
#include <cstddef>
#include <functional>
#include <memory>

namespace cuda_on_cpu {

// A function with a stack of its own, which another function resumes, and which gives the processor back by yield().
// It is called again and again; a fiber that is destroyed while it waits is never resumed, and what is on its stack is
// not destroyed. All fibers are resumed by one thread, and none by a fiber.
class Fiber {
 public:
  explicit Fiber(std::function<void()> body);

  // Returns when the fiber yields.
  void resume();
  static void yield();

 private:
  static void enter();

  std::function<void()> body_;
  std::unique_ptr<std::byte[]> stack_;
  bool isStarted_ = false;
  std::jmp_buf here_ = {};
  std::jmp_buf resumer_ = {};
};

}  // namespace cuda_on_cpu
