// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>

namespace bagua {

// Lets the profiler of the thread that makes it see what another thread does, for a program that runs there. Of the
// caller's thread-local state nothing else travels: during a backward it holds Python objects.
class ProfilerHandover {
 public:
  // Empty, and free of cost, unless a profiler is recording this thread.
  static ProfilerHandover ofThisThread();

  // While it lives the profiler records the current thread.
  class Scope {
   public:
    explicit Scope(const ProfilerHandover& handover);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    const bool isActive_;
    at::RecordFunctionTLS callbacks_;
    std::shared_ptr<c10::ThreadLocalDebugInfo> info_;
  };

 private:
  at::RecordFunctionTLS callbacks_;
  std::shared_ptr<c10::ThreadLocalDebugInfo> info_;
};

}  // namespace bagua
