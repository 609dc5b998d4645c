// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
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
    int size = 1;
    std::vector<uint64_t> globalRanks;
  };
  struct Entry {
    uint64_t id = 0;
    uint64_t group = 0;
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

  // Returns what begin() calls the group.
  uint64_t addGroup(Group group);
  // Nothing of it begins any more. It is forgotten with the last of its operations that the ring holds.
  void endGroup(uint64_t id);
  // Returns what end() calls the operation.
  uint64_t begin(uint64_t group, const Operation& operation, const ProgramFingerprint& program);
  void end(uint64_t id, bool isSuccess);

  // A pickle, as of torch's recorder.
  [[nodiscard]] std::string dump() const;
  // Through torch's DebugInfoWriter, unless that is switched off. Returns the file's name; empty: nothing written.
  [[nodiscard]] std::string write(uint64_t globalRank) const;

 private:
  struct KnownGroup {
    Group group;
    uint64_t messages = 0;
    // In the ring.
    size_t entries = 0;
    bool hasEnded = false;
  };

  // Under the mutex.
  void makeRoom(const Entry& overwritten);
  void dropIfUnused(std::map<uint64_t, KnownGroup>::iterator known);

  const size_t capacity_;
  mutable ForkHeldMutex mutex_;
  std::map<uint64_t, KnownGroup> groups_;
  uint64_t nextGroup_ = 0;
  // A ring: entry i is at i % capacity_.
  std::vector<Entry> entries_;
  uint64_t next_ = 0;
};

}  // namespace bagua
