// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "backend/health/operation_log.h"
#include "backend/operation/operation.h"
#include "backend/os/process_mark.h"

namespace bagua {

class HealthThread;

// Looks after the operations of one group on this rank, together with the other ranks:
// - a failure on one rank is reported through the store and ends the operations of all, which name that same cause;
// - so does the death of a rank that a transport finds, also while all wait for another;
// - an operation that exceeds its timeout is ended, and the error names the ranks that have not come to it;
// - one that takes unusually long is warned of, with the names of the slowest ranks;
// - the last operations are written to a file when the group fails (flight_recorder.h).
//
// One thread does all of that ("bagua_health"), started with the first operation. It alone talks to the store, and
// nobody waits for it without a limit: the store may be gone, or not answer. A store that throws is tried again, over
// a new connection, at growing intervals. All methods may be called from any thread.
class GroupHealth {
 public:
  // How long a store may be in trouble, by default, before the group goes on without it.
  static constexpr std::chrono::milliseconds kStorePatience = std::chrono::seconds(60);

  // `store` is null where the ranks have none in common: then every rank is on its own, without a thread.
  // `globalRanks` are the group's ranks as the flight recorder names them; empty: as the group does.
  // `survivesDeaths`: callers go on without a rank that dies, and learn of that at once; of what follows from another
  // rank's error without its words, where those take long.
  GroupHealth(const GroupIdentity& group, c10::intrusive_ptr<c10d::Store> store, std::vector<uint64_t> globalRanks = {},
              std::chrono::milliseconds storePatience = kStorePatience, bool survivesDeaths = false);
  ~GroupHealth();
  GroupHealth(const GroupHealth&) = delete;
  GroupHealth& operator=(const GroupHealth&) = delete;

  // Adds a log for the operations of one executor, which is called `name` on every rank. `findLost` may be null.
  std::shared_ptr<OperationLog> addLog(const std::string& name, OperationLog::FindLost findLost = nullptr);
  // Ends the thread. What has been reported is passed on first, for a short while at most.
  void stop();

 private:
  const ProcessMark mark_;
  // A thread that is stuck in a store outlives the group.
  const std::shared_ptr<HealthThread> thread_;
};

}  // namespace bagua
