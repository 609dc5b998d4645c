// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "backend/os/unshared_file.h"

namespace bagua {

// A piece of /dev/shm mapped by several processes of a host, all of one user. It has a name, which cannot be guessed,
// only until all have opened it. Should its creator be killed before that, the name is removed by whoever has opened
// it, or else by the next process of the same user that makes a segment: nothing is left behind for long, however they
// end.
class SharedSegment {
 public:
  // Reserves and maps `bytes` of zeros under a new name. Empty where there is no shared memory or not enough of it.
  static std::optional<SharedSegment> create(size_t bytes, std::string& whyNot);
  // `name` is a peer's word: empty unless it is a segment of exactly `bytes` that create() made for this user.
  static std::optional<SharedSegment> open(const std::string& name, size_t bytes, std::string& whyNot);

  SharedSegment(SharedSegment&& other) noexcept;
  SharedSegment& operator=(SharedSegment&&) = delete;
  ~SharedSegment();

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] uint8_t* data() const { return data_; }
  // Idempotent. For the creator, once everybody has opened it; no effect elsewhere while the creator lives.
  void removeName();
  // removeName() for the only one that the creator has told the name.
  void removeOnlyHeardName();

  // False in a forked child, which has no access to the memory.
  [[nodiscard]] bool isOpen() const { return file_.isOpen(); }

  // Whoever is in `seat` keeps it until the process ends or drops this segment; others can ask, also in the same
  // process. The kernel keeps account by open files, which do not depend on process ids: containers may have equal
  // ones.
  void take(int seat);
  [[nodiscard]] bool isTaken(int seat) const;

 private:
  SharedSegment(std::string name, UnsharedFile file, uint8_t* data, size_t bytes)
      : name_(std::move(name)), file_(std::move(file)), data_(data), bytes_(bytes) {}
  // Names of segments whose creators have been killed.
  static void removeAbandonedNames();
  static std::optional<SharedSegment> map(const std::string& name, UnsharedFile file, size_t bytes,
                                          std::string& whyNot);

  std::string name_;
  UnsharedFile file_;
  uint8_t* data_;
  size_t bytes_;
  bool ownsName_ = false;
};

}  // namespace bagua
