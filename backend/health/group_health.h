// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "backend/operation.h"
#include "backend/program_fingerprint.h"

namespace bagua {

// Looks after the operations of one group on this rank, together with the other ranks:
// - a failure on one rank is reported through the store and ends the operations of all, which name that same cause;
// - an operation that exceeds its timeout is ended, and the error names the ranks that have not come to it;
// - one that takes unusually long is warned of, with the names of the slowest ranks;
// - the last operations are written to a file when the group fails (flight_recorder.h).
//
// One thread does all of that ("bagua_health"), started with the first operation. It alone talks to the store, and
// nobody waits for it without a limit: the store may be gone, or not answer. A store that throws is tried again, over
// a new connection, at growing intervals. All methods may be called from any thread.
class GroupHealth {
 public:
  class Track;

  // How long a store may be in trouble, by default, before the group goes on without it.
  static constexpr std::chrono::milliseconds kStorePatience = std::chrono::seconds(60);

  // `store` is null where the ranks have none in common: then every rank is on its own, without a thread.
  // `globalRanks` are the group's ranks as the flight recorder names them; empty: as the group does.
  GroupHealth(const GroupIdentity& group, c10::intrusive_ptr<c10d::Store> store, std::vector<uint64_t> globalRanks = {},
              std::chrono::milliseconds storePatience = kStorePatience);
  ~GroupHealth();
  GroupHealth(const GroupHealth&) = delete;
  GroupHealth& operator=(const GroupHealth&) = delete;

  // For the operations of one executor, which is called `name` on every rank.
  std::shared_ptr<Track> addTrack(const std::string& name);
  // Ends the thread. What has been reported is passed on first, for a short while at most.
  void stop();

 private:
  struct Core;
  // Shared with the thread: one that is stuck in a store outlives the group.
  const std::shared_ptr<Core> core_;
};

// The operations of one executor. Outlives the group if need be.
class GroupHealth::Track {
 public:
  using Token = uint64_t;
  // Ends all operations of the executor; `cause` is what they are to say.
  using Abort = std::function<void(const std::string& cause)>;

  Track(std::shared_ptr<Core> core, size_t index) : core_(std::move(core)), index_(index) {}

  // Called once at most, on the health's thread; here and now if the group has failed already.
  void onFailure(Abort abort);

  // The operation's timeout counts from here. A message between two ranks has no place in the order of programs.
  enum class Kind { kProgram, kMessage };
  Token begin(const Operation& operation, Kind kind = Kind::kProgram) {
    return begin(operation, fingerprintOf(operation), kind);
  }
  Token begin(const Operation& operation, const ProgramFingerprint& program, Kind kind = Kind::kProgram);
  void end(Token token, bool isSuccess);
  // What the caller of the operation is to be told when `error` has ended it: the group's first failure, which this may
  // be. Blocks until the ranks have agreed on it, for a few seconds at most.
  std::exception_ptr explain(const std::exception_ptr& error, const Operation& operation);

  // Tells the other ranks that this one has given its operations up. Waits for nothing.
  void reportAbort(const std::string& reason);

  // How long a transport should go on after an operation's timeout: its error knows less about the other ranks.
  [[nodiscard]] std::chrono::milliseconds patience(std::chrono::milliseconds timeout) const;

 private:
  const std::shared_ptr<Core> core_;
  const size_t index_;
};

}  // namespace bagua
