// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

namespace bagua {

// Tells an object from the copy of it that a forked child has. The threads, connections and shared memory behind a copy
// are the parent's: the child must not use, stop or free them. Process ids do not tell, as containers have equal ones.
class ProcessMark {
 public:
  ProcessMark() : forks_(forks()) {}

  // Whether this mark was made before the fork() that made this process.
  [[nodiscard]] bool isFromParent() const { return forks_ != forks(); }

 private:
  // How many times fork() has been called on the way from the first process to this one.
  static uint64_t forks();

  const uint64_t forks_;
};

// Keeps `object` until the end of the process, for a forked child that must not destroy what is its parent's.
template <typename Object>
void neverDestroy(Object&& object) {
  // NOLINTNEXTLINE(cppcoreguidelines-owning-memory): that is the point
  new std::remove_reference_t<Object>(std::forward<Object>(object));
}

}  // namespace bagua
