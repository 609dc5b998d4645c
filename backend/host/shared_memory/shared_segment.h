// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

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

  // A process that is in `seat` keeps it until it ends or drops the segment; others can ask. Seats of this process look
  // empty.
  void take(int seat);
  [[nodiscard]] bool isTaken(int seat) const;

 private:
  SharedSegment(std::string name, int file, uint8_t* data, size_t bytes, bool ownsName)
      : name_(std::move(name)), file_(file), data_(data), bytes_(bytes), ownsName_(ownsName) {}
  // Names of segments whose creators have been killed.
  static void removeAbandonedNames();
  static std::optional<SharedSegment> map(const std::string& name, int file, size_t bytes, bool ownsName,
                                          std::string& whyNot);

  std::string name_;
  int file_ = -1;
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
  bool ownsName_ = false;
};

}  // namespace bagua
