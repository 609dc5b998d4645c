// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <utility>

namespace bagua {

// An open file, or socket, that forked children do not share: they close their copy at once. So when this process ends
// its locks of the open file description go, and its peers notice, though its children may live on.
class UnsharedFile {
 public:
  UnsharedFile() = default;
  // Takes over a descriptor; negative: none, as what failed to open.
  explicit UnsharedFile(int file);
  UnsharedFile(UnsharedFile&& other) noexcept : slot_(std::exchange(other.slot_, nullptr)) {}
  UnsharedFile& operator=(UnsharedFile&& other) noexcept {
    std::swap(slot_, other.slot_);
    return *this;
  }
  ~UnsharedFile();

  // False in a forked child, and of one that was moved from.
  [[nodiscard]] bool isOpen() const { return number() >= 0; }
  // Negative if not open.
  [[nodiscard]] int number() const { return slot_ == nullptr ? -1 : slot_->load(std::memory_order_relaxed); }

 private:
  // In the list of all unshared files, which has this for as long as the file is open. Null: none.
  std::atomic<int>* slot_ = nullptr;
};

}  // namespace bagua
