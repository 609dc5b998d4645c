// SPDX-License-Identifier: Apache-2.0
// What the thread does about operations that take their time: it finds peers that have gone, warns, and ends what
// exceeds its timeout.
#include <c10/util/Logging.h>

#include <algorithm>

#include "backend/health/health_thread.h"
#include "backend/health/health_times.h"

namespace bagua {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

std::string HealthThread::attendance(const std::string& executor, const RunningOperation& operation) const {
  const bool isMessage = operation.kind == OperationLog::Kind::kMessage;
  auto found = attendanceOf(operation.program, isMessage, executor, roll_.answers(), roll_.silent());
  if (isMessage) {
    // Only the other end matters.
    const int peer = operation.program.peer;
    std::erase_if(found.absent, [&](const auto& entry) { return peer >= 0 && entry.first != peer; });
    std::erase_if(found.silent, [&](int rank) { return peer >= 0 && rank != peer; });
  }
  return found.describe();
}

void HealthThread::lookForLost() {
  std::vector<std::pair<OperationLog::FindLost, RunningOperation>> slow;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    // What a rank has seen itself says more than that a connection is lost.
    if (failure_ || report_) return;
    slow = operations_.watchedFor(kTick);
  }
  for (const auto& [findLost, operation] : slow) {
    const auto lost = findLost();
    if (!lost) continue;
    if (!lostSince_) lostSince_ = Clock::now();
    if (Clock::now() - std::max(*lostSince_, operation.begun) >= kGoneTime) endLost(*lost, operation);
  }
}

void HealthThread::endLost(const std::string& lost, const RunningOperation& operation) {
  const std::string message = c10::str(describe(operation.program), " on rank ", group_.rank, " of ", group_.size,
                                       ", group '", group_.name, "' failed: ", lost);
  try {
    const StoreLink::Call call(link_);
    if (link_.board()) return tell(message, /*isUrgent=*/survivesDeaths_);
  } catch (...) {
    noteTrouble("the store does not answer: " + messageOf(std::current_exception()));
  }
  // The store may only be slow, or gone with the rank.
  if (Clock::now() - *lostSince_ >= kTroubleTime) failAlone(message);
}

void HealthThread::inspectOperations() {
  std::vector<std::pair<std::string, RunningOperation>> running;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_) return;
    running = operations_.running();
  }
  for (const auto& [executor, operation] : running) inspect(executor, operation);
}

void HealthThread::inspect(const std::string& executor, const RunningOperation& operation) {
  const auto now = Clock::now();
  const auto lead = std::min(kRollCallLead, operation.timeout / 2);
  if (now - operation.begun < kTick && operation.timeout > kTick) return;
  try {
    const StoreLink::Call call(link_);
    const auto end = operation.begun + operation.timeout;
    if (now >= end - lead) {
      const auto roll = callTheRoll(operation.begun, end + kTurnTime);
      if (roll == RollCall::State::kOver && operation.isOverdue()) endOverdue(executor, operation);
    } else if (warnAfter_.count() > 0 && now >= operation.nextWarning) {
      const auto roll = callTheRoll(operation.begun, end);
      if (roll != RollCall::State::kUnderWay) warn(executor, operation, roll);
    }
  } catch (...) {
    noteTrouble("the store does not answer: " + messageOf(std::current_exception()));
    if (operation.isOverdue()) endOverdue(executor, operation);
  }
}

void HealthThread::endOverdue(const std::string& executor, const RunningOperation& operation) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    // What is about to be reported ends this one too.
    if (failure_ || (report_ && link_.board())) return;
    // Done after all.
    if (!operations_.isRunning(operation.token)) return;
  }
  const std::string message =
      c10::str(describe(operation.program), " on rank ", group_.rank, " of ", group_.size, ", group '", group_.name,
               "' failed: Timed out waiting for the other ranks: timed out after ", operation.timeout.count(), " ms.");
  if (!link_.board()) return failAlone(message);
  tell(message + attendance(executor, operation));
}

void HealthThread::warn(const std::string& executor, const RunningOperation& operation, RollCall::State roll) {
  const auto waited = std::chrono::duration_cast<milliseconds>(Clock::now() - operation.begun);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    operations_.setNextWarning(operation.token, operation.begun + waited * kWarningInterval);
  }
  // The rank that has asked tells for all that wait.
  if (roll == RollCall::State::kOfAnother) return;
  LOG(WARNING) << "bagua: rank " << group_.rank << " of " << group_.size << ", group '" << group_.name
               << "', has been in " << describe(operation.program) << " for " << waited.count() << " ms of the "
               << operation.timeout.count() << " ms that it may take." << attendance(executor, operation);
}

}  // namespace bagua
