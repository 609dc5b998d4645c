// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace bagua {

// Counts what has been written into a store for others to look at, on any rank and in any group, so that a process asks
// for all of its groups at once whether there is anything to look at. Calls block for as long as the store does and
// throw what it throws.
class StorePulse {
 public:
  // The one of this process for a store, however it is prefixed, and for its clones.
  static std::shared_ptr<StorePulse> of(c10d::Store& store);

  // To be called after something has been written. `store` is the store, or a clone of it, used by this thread alone.
  void beat(c10d::Store& store);
  // How many beats there have been, as of the last time that the store was asked: now, unless that was done less than
  // `interval` ago, or another thread is at it.
  uint64_t beats(c10d::Store& store, std::chrono::milliseconds interval);

 private:
  // Held while the store is asked.
  std::mutex mutex_;
  std::chrono::steady_clock::time_point asked_;
  // Negative: the store has not been asked yet.
  std::atomic<int64_t> beats_ = -1;
};

}  // namespace bagua
