// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace bagua {

// Calls part(begin, end) for parts of [0, count) on the intra-op threads that torch was given: on one more of them for
// every `grain`.
//
// Not at::parallel_for: that is compiled into its caller, and without OpenMP, as here, to a plain loop. With OpenMP of
// our own there might be two of its runtimes in a process.
void shareOut(int64_t count, int64_t grain, c10::function_ref<void(int64_t begin, int64_t end)> part);

// While it lives, whatever its thread shares out stays on that thread. For threads that work beside the training, whose
// the others are.
class StayOnThread {
 public:
  StayOnThread();
  ~StayOnThread();
  StayOnThread(const StayOnThread&) = delete;
  StayOnThread& operator=(const StayOnThread&) = delete;

 private:
  const bool before_;
};

}  // namespace bagua
