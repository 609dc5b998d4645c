// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "backend/operation/operation.h"
#include "backend/operation/program_fingerprint.h"

namespace bagua {

class HealthThread;

// The operations of one executor, as GroupHealth is told of them. Outlives the group if need be. All methods may be
// called from any thread.
class OperationLog {
 public:
  using Token = uint64_t;
  // Ends all operations of the executor; `cause` is what they are to say.
  using Abort = std::function<void(const std::string& cause)>;
  // Says in words which peer has gone without leaving the group. The health's thread asks it a few times a second while
  // a program takes its time, so it must not block. Such a death ends the programs, whichever rank they wait for.
  using FindLost = std::function<std::optional<std::string>()>;

  OperationLog(std::shared_ptr<HealthThread> health, size_t index) : health_(std::move(health)), index_(index) {}

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
  const std::shared_ptr<HealthThread> health_;
  const size_t index_;
};

}  // namespace bagua
