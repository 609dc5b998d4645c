// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "backend/health/failure_board.h"
#include "backend/health/flight_recorder.h"
#include "backend/health/operation_table.h"
#include "backend/health/roll_call.h"
#include "backend/health/store_link.h"
#include "backend/operation/operation.h"

namespace bagua {

// What a GroupHealth and its OperationLogs share: the table of operations, what this rank has to report, the failure
// that the ranks have agreed on, and the thread that reports, hears and looks at what takes its time. The thread keeps
// this alive; one that is stuck in a store outlives the group.
class HealthThread : public std::enable_shared_from_this<HealthThread> {
 public:
  HealthThread(GroupIdentity group, c10::intrusive_ptr<c10d::Store> store, std::vector<uint64_t> globalRanks,
               std::chrono::milliseconds storePatience, bool survivesDeaths);
  HealthThread(const HealthThread&) = delete;
  HealthThread& operator=(const HealthThread&) = delete;

  // For OperationLog and GroupHealth, which describe them.
  size_t addLog(const std::string& name, OperationLog::FindLost findLost);
  void stop();
  void onFailure(size_t log, OperationLog::Abort abort);
  OperationLog::Token begin(size_t log, RunningOperation operation, const Operation& described);
  void end(size_t log, OperationLog::Token token, bool isSuccess);
  std::exception_ptr explain(const std::exception_ptr& error, const Operation& operation);
  void reportAbort(const std::string& reason);
  [[nodiscard]] std::chrono::milliseconds patience(std::chrono::milliseconds timeout) const;

 private:
  // What this rank has to say to the others.
  struct Report {
    std::string message;
    bool isSymptom = false;
    // Callers are not to wait until the others have read it: abort() was called, or they go on without a rank that
    // died.
    bool isUrgent = false;
    std::chrono::steady_clock::time_point since;
  };

  void start();
  void run() noexcept;
  void step();
  void look();
  // Whether there may be something new in the store.
  [[nodiscard]] bool hasNews();
  void passOnReport();
  void noteTrouble(const std::string& text, bool isOver = true);
  void giveUpStore(const std::string& why);
  RollCall::State callTheRoll(std::chrono::steady_clock::time_point notBefore,
                              std::chrono::steady_clock::time_point takeOverAt);

  // Ends the programs of an executor one of whose peers has gone.
  void lookForLost();
  void endLost(const std::string& lost, const RunningOperation& operation);
  // Warns of what takes long, and ends what exceeds its timeout.
  void inspectOperations();
  void inspect(const std::string& executor, const RunningOperation& operation);
  void endOverdue(const std::string& executor, const RunningOperation& operation);
  void warn(const std::string& executor, const RunningOperation& operation, RollCall::State roll);
  [[nodiscard]] std::string attendance(const std::string& executor, const RunningOperation& operation) const;

  void setFailure(const Failure& failure);
  // Tells the other ranks, who read it before this rank's own callers learn of it, unless it is urgent.
  void tell(const std::string& message, bool isUrgent = false);
  // Where there is no store to agree in.
  void failAlone(const std::string& message);
  // Under the mutex.
  [[nodiscard]] std::string messageOfFailure() const;
  [[nodiscard]] std::string whyCutOff() const;

  const GroupIdentity group_;
  const uint64_t globalRank_;
  const bool survivesDeaths_;
  const std::shared_ptr<FlightRecorder::Group> recorded_;
  const std::chrono::milliseconds warnAfter_;
  const std::chrono::milliseconds busyLook_;
  const std::chrono::milliseconds idleLook_;

  // Has a mutex of its own, which is taken after this one.
  StoreLink link_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  OperationTable operations_;
  std::optional<Report> report_;
  std::optional<Failure> failure_;
  std::thread thread_;
  bool isStarted_ = false;
  bool isStopping_ = false;
  bool hasEnded_ = false;

  // Of the thread alone.
  RollCall roll_;
  // Since when a peer has been known to be gone.
  std::optional<std::chrono::steady_clock::time_point> lostSince_;
  std::chrono::steady_clock::time_point lastLook_;
  // What there was in the store at the last look.
  uint64_t seenBeats_ = 0;
};

}  // namespace bagua
