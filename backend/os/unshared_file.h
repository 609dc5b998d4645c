// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <utility>

namespace bagua {

// An open file that forked children do not share: they close their copy at once. So locks of the open file description
// go when this process ends, though its children may live on.
class UnsharedFile {
 public:
  // Takes over a descriptor; negative: none, as what failed to open.
  explicit UnsharedFile(int file);
  UnsharedFile(UnsharedFile&& other) noexcept : slot_(std::exchange(other.slot_, kNone)) {}
  UnsharedFile& operator=(UnsharedFile&&) = delete;
  ~UnsharedFile();

  // False in a forked child, and of one that was moved from.
  [[nodiscard]] bool isOpen() const { return descriptor() >= 0; }
  // Negative if not open.
  [[nodiscard]] int descriptor() const;

 private:
  static constexpr size_t kNone = static_cast<size_t>(-1);

  // In the list of all unshared files.
  size_t slot_;
};

}  // namespace bagua
