// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>

namespace bagua {

// Threads on which futures are completed, because their callbacks may do anything: wait for a later operation of the
// same group, for one, as torch's PowerSGD hook does. The thread that runs the programs must never be in one. A task
// that finds every thread busy gets a new one, so a callback that blocks holds up no other. Threads end with stop().
class CallbackThreads {
 public:
  CallbackThreads();
  ~CallbackThreads();
  CallbackThreads(const CallbackThreads&) = delete;
  CallbackThreads& operator=(const CallbackThreads&) = delete;

  void run(std::function<void()> task);
  // Ends the threads that are idle, and the others when their task is done. Waits for neither. Tasks that come later
  // still run.
  void stop();

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace bagua
