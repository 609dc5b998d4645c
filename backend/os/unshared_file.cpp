// SPDX-License-Identifier: Apache-2.0
#include "backend/os/unshared_file.h"

#include <c10/util/Exception.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "backend/os/fork_held_mutex.h"

namespace bagua {
namespace {

constexpr int kClosed = -1;
constexpr int kFree = -2;

// All unshared files of this process.
class Registry {
 public:
  static Registry& instance() {
    // Never destroyed: a file may be closed, and the process may fork, at its very end.
    static auto* const registry = new Registry();
    return *registry;
  }

  size_t add(int file) {
    const std::lock_guard lock(mutex_);
    const auto slot = std::find(files_.begin(), files_.end(), kFree);
    if (slot == files_.end()) return files_.push_back(file), files_.size() - 1;
    *slot = file;
    return slot - files_.begin();
  }

  int get(size_t slot) {
    const std::lock_guard lock(mutex_);
    return files_[slot];
  }

  void remove(size_t slot) {
    const std::lock_guard lock(mutex_);
    if (files_[slot] >= 0) ::close(files_[slot]);
    files_[slot] = kFree;
  }

 private:
  Registry() {
    const int error = ::pthread_atfork(nullptr, nullptr, [] { instance().closeAfterFork(); });
    TORCH_CHECK(error == 0, "bagua: cannot ask to be told of forks, error ", error);
  }

  void closeAfterFork() {
    for (int& file : files_) {
      if (file < 0) continue;
      ::close(file);
      file = kClosed;
    }
  }

  ForkHeldMutex mutex_;
  std::vector<int> files_;
};

}  // namespace

UnsharedFile::UnsharedFile(int file) : slot_(file < 0 ? kNone : Registry::instance().add(file)) {}

UnsharedFile::~UnsharedFile() {
  if (slot_ != kNone) Registry::instance().remove(slot_);
}

int UnsharedFile::descriptor() const { return slot_ == kNone ? kClosed : Registry::instance().get(slot_); }

}  // namespace bagua
