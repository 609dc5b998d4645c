// SPDX-License-Identifier: Apache-2.0
#include "backend/os/fork_held_mutex.h"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <algorithm>
#include <thread>
#include <vector>

namespace bagua {
namespace {

// All of this process.
class AllMutexes {
 public:
  static AllMutexes& instance() {
    // Never destroyed: the process may fork at its very end.
    static auto* const mutexes = new AllMutexes();
    return *mutexes;
  }

  void add(ForkHeldMutex* mutex) {
    const std::lock_guard<std::mutex> lock(mutex_);
    mutexes_.push_back(mutex);
  }

  void remove(ForkHeldMutex* mutex) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::erase(mutexes_, mutex);
  }

 private:
  AllMutexes() {
    const int error =
        ::pthread_atfork([] { instance().lockAll(); }, [] { instance().unlockAll(); }, [] { instance().unlockAll(); });
    TORCH_CHECK(error == 0, "bagua: cannot ask to be told of forks, error ", error);
  }

  // All at once, or none while one is taken: their owners may take them in any order, and make others meanwhile.
  void lockAll() {
    const auto isTaken = [](ForkHeldMutex* mutex) { return !mutex->try_lock(); };
    while (true) {
      mutex_.lock();
      const auto taken = std::ranges::find_if(mutexes_, isTaken);
      if (taken == mutexes_.end()) return;
      std::for_each(mutexes_.begin(), taken, [](ForkHeldMutex* mutex) { mutex->unlock(); });
      mutex_.unlock();
      std::this_thread::yield();
    }
  }

  void unlockAll() {
    for (auto* const mutex : mutexes_) mutex->unlock();
    mutex_.unlock();
  }

  std::mutex mutex_;
  std::vector<ForkHeldMutex*> mutexes_;
};

}  // namespace

ForkHeldMutex::ForkHeldMutex() { AllMutexes::instance().add(this); }

ForkHeldMutex::~ForkHeldMutex() { AllMutexes::instance().remove(this); }

}  // namespace bagua
