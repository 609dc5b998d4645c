// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/operation/program_fingerprint.h"
#include "backend/os/fork_held_mutex.h"

namespace bagua {

// The last operations of this process, of all its groups, in the format that `torch.distributed.flight_recorder` reads.
// Not torch's own recorder: that one is a template without an instance outside libtorch, takes a lock and a stack trace
// for each operation, and its hook for other backends is new in 2.15. The environment variables are torch's: see
// docs/reliability.md.
class FlightRecorder {
 public:
  struct Group {
    std::string name;
    // Of this process.
    int rank = 0;
    std::vector<uint64_t> globalRanks;
    // The recorder writes these.
    uint64_t id = 0;
    uint64_t messages = 0;
  };
  struct Entry {
    uint64_t id = 0;
    std::shared_ptr<const Group> group;
    c10d::OpType type = c10d::OpType::UNKNOWN;
    ProgramFingerprint program;
    uint64_t messages = 0;  // of the group, so far
    int64_t created = 0;    // nanoseconds since 1970
    int64_t completed = 0;  // 0: has not
    int64_t timeout = 0;    // milliseconds
    bool hasFailed = false;
    uint64_t thread = 0;
  };

  static FlightRecorder& instance();
  explicit FlightRecorder(size_t capacity) : capacity_(capacity) {}

  // A group is known as long as whoever has added it keeps the result, or the ring has one of its operations.
  std::shared_ptr<Group> addGroup(Group group);
  // Returns what end() calls the operation.
  uint64_t begin(const std::shared_ptr<Group>& group, const Operation& operation, const ProgramFingerprint& program);
  void end(uint64_t id, bool isSuccess);

  // A pickle, as of torch's recorder.
  [[nodiscard]] std::string dump() const;
  // Through torch's DebugInfoWriter, unless that is switched off. Returns the file's name; empty: nothing written.
  [[nodiscard]] std::string write(uint64_t globalRank) const;

 private:
  const size_t capacity_;
  mutable ForkHeldMutex mutex_;
  // In the order in which they were added.
  std::vector<std::weak_ptr<const Group>> groups_;
  uint64_t nextGroup_ = 0;
  // A ring: entry i is at i % capacity_.
  std::vector<Entry> entries_;
  uint64_t next_ = 0;
};

}  // namespace bagua
