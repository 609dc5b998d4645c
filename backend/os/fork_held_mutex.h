// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <mutex>

namespace bagua {

// A mutex for what the groups of a process share. It is held over every fork(), so that a forked child finds it free
// and what it guards in order, whatever another thread of the parent was about to do. What is done under it neither
// forks nor waits for another process: a fork waits for it.
class ForkHeldMutex {
 public:
  ForkHeldMutex();
  ~ForkHeldMutex();
  ForkHeldMutex(const ForkHeldMutex&) = delete;
  ForkHeldMutex& operator=(const ForkHeldMutex&) = delete;

  void lock() { mutex_.lock(); }
  bool try_lock() { return mutex_.try_lock(); }  // NOLINT(readability-identifier-naming): the standard's name
  void unlock() { mutex_.unlock(); }

 private:
  std::mutex mutex_;
};

}  // namespace bagua
