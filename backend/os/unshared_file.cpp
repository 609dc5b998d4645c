// SPDX-License-Identifier: Apache-2.0
#include "backend/os/unshared_file.h"

#include <c10/util/Exception.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <mutex>

#include "backend/os/fork_held_mutex.h"

namespace bagua {
namespace {

constexpr int kClosed = -1;
constexpr int kFree = -2;

// The unshared files of this process. A file is looked up with every send and receive of every thread, so that this
// takes no lock: slots never move.
class Registry {
 public:
  static Registry& instance() {
    // Never destroyed: a file may be closed, and the process may fork, at its very end.
    static auto* const registry = new Registry();
    return *registry;
  }

  std::atomic<int>& add(int file) {
    const std::lock_guard lock(mutex_);
    const auto slot = std::find(files_.begin(), files_.end(), kFree);
    if (slot == files_.end()) return files_.emplace_back(file);
    *slot = file;
    return *slot;
  }

  void remove(std::atomic<int>& slot) {
    const std::lock_guard lock(mutex_);
    if (slot >= 0) ::close(slot);
    slot = kFree;
  }

 private:
  Registry() {
    const int error = ::pthread_atfork(nullptr, nullptr, [] { instance().closeAfterFork(); });
    TORCH_CHECK(error == 0, "bagua: cannot ask to be told of forks, error ", error);
  }

  void closeAfterFork() {
    for (auto& file : files_) {
      if (file < 0) continue;
      ::close(file);
      file = kClosed;
    }
  }

  ForkHeldMutex mutex_;
  std::deque<std::atomic<int>> files_;
};

}  // namespace

UnsharedFile::UnsharedFile(int file) : slot_(file < 0 ? nullptr : &Registry::instance().add(file)) {}

UnsharedFile::~UnsharedFile() {
  if (slot_ != nullptr) Registry::instance().remove(*slot_);
}

}  // namespace bagua
