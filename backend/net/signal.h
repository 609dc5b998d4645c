// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace bagua::net {

// Something has happened that a thread may wait for. It takes the count, looks whether what it wants is there, and if
// not waits for the count to change: nothing is missed in between, and no lock is held while it looks.
class Signal {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  uint64_t count() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return count_;
  }
  void notify() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ++count_;
    }
    changed_.notify_all();
  }
  // False where the deadline has passed.
  bool waitPast(uint64_t count, Deadline deadline) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_until(lock, deadline, [&] { return count_ != count; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t count_ = 0;
};

}  // namespace bagua::net
