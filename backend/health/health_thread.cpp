// SPDX-License-Identifier: Apache-2.0
#include "backend/health/health_thread.h"

#include <c10/util/Logging.h>
#include <c10/util/thread_name.h>

#include <algorithm>
#include <utility>

#include "backend/config.h"
#include "backend/health/health_times.h"
#include "backend/operation/backend_error.h"
#include "backend/operation/peer_errors.h"

namespace bagua {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

HealthThread::HealthThread(GroupIdentity group, c10::intrusive_ptr<c10d::Store> store,
                           std::vector<uint64_t> globalRanks, milliseconds storePatience, bool survivesDeaths)
    : group_(std::move(group)),
      globalRank_(globalRanks.at(group_.rank)),
      survivesDeaths_(survivesDeaths),
      recorded_(FlightRecorder::instance().addGroup(
          {.name = group_.name, .rank = group_.rank, .globalRanks = std::move(globalRanks)})),
      warnAfter_(config::warnAfter()),
      busyLook_(std::max(kBusyLook, group_.size * kLookPerRank)),
      idleLook_(std::max(kIdleLook, group_.size * kLookPerRank)),
      link_(group_, std::move(store), storePatience),
      roll_(group_.rank, group_.size, [this] {
        const std::lock_guard<std::mutex> lock(mutex_);
        return operations_.activities();
      }) {}

size_t HealthThread::addLog(const std::string& name, OperationLog::FindLost findLost) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return operations_.add(name, std::move(findLost));
}

void HealthThread::stop() {
  std::thread thread;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    isStopping_ = true;
    changed_.notify_all();
    thread = std::move(thread_);
    if (!thread.joinable()) return;
    changed_.wait_for(lock, kStopTime, [this] { return hasEnded_; });
    if (!hasEnded_ || thread.get_id() == std::this_thread::get_id()) return thread.detach();
  }
  thread.join();
}

void HealthThread::onFailure(size_t log, OperationLog::Abort abort) {
  std::string cause;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_) return operations_.onFailure(log, std::move(abort));
    cause = messageOfFailure();
  }
  abort(cause);
}

OperationLog::Token HealthThread::begin(size_t log, RunningOperation operation, const Operation& described) {
  operation.recorded = FlightRecorder::instance().begin(recorded_, described, operation.program);
  operation.nextWarning = operation.begun + warnAfter_;
  const std::lock_guard<std::mutex> lock(mutex_);
  start();
  return operations_.begin(log, operation);
}

void HealthThread::end(size_t log, OperationLog::Token token, bool isSuccess) {
  std::optional<RunningOperation> ended;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ended = operations_.end(log, token, isSuccess);
  }
  if (ended) FlightRecorder::instance().end(ended->recorded, isSuccess);
}

std::exception_ptr HealthThread::explain(const std::exception_ptr& error, const Operation& operation) {
  auto own = withContext(error, operation, group_);
  std::unique_lock<std::mutex> lock(mutex_);
  if (!isStarted_) return own;
  const bool isUrgent = survivesDeaths_ && isDeath(error);
  const bool waitsBriefly = survivesDeaths_ && isSymptom(error);
  if (!failure_ && !link_.isGivenUp()) {
    if (!report_) {
      report_.emplace(Report{
          .message = messageOf(own), .isSymptom = isSymptom(error), .isUrgent = isUrgent, .since = Clock::now()});
      changed_.notify_all();
    }
    const auto isSettled = [&] { return failure_ || hasEnded_ || link_.isGivenUp(); };
    const auto patience = isUrgent ? milliseconds(0) : waitsBriefly ? busyLook_ + kTick : kAgreementTime;
    const auto end = Clock::now() + patience;
    while (!isSettled() && !link_.isStuck() && Clock::now() < end) changed_.wait_for(lock, kTick);
  }
  if (failure_) return withContext(makeBackendError(messageOfFailure()), operation, group_);
  if (isUrgent || waitsBriefly) return own;
  return makeBackendError(c10::str(messageOf(own), " (The other ranks could not be told: ", whyCutOff(), ")"));
}

void HealthThread::reportAbort(const std::string& reason) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    // Otherwise nobody waits for a rank that has begun nothing.
    if (survivesDeaths_) start();
    if (!isStarted_ || failure_ || report_) return;
    report_.emplace(Report{.message = c10::str("rank ", group_.rank, " of ", group_.size, ", group '", group_.name,
                                               "': ", reason, " (Connection closed by peer)"),
                           .isUrgent = true,
                           .since = Clock::now()});
  }
  changed_.notify_all();
}

milliseconds HealthThread::patience(milliseconds timeout) const {
  const bool isLookedAfter = link_.exists() && group_.size > 1 && timeout.count() > 0;
  return isLookedAfter ? kPatience : milliseconds(0);
}

// Under the mutex.
void HealthThread::start() {
  if (isStarted_ || isStopping_ || !link_.exists() || group_.size == 1) return;
  thread_ = std::thread([self = shared_from_this()] { self->run(); });
  isStarted_ = true;
}

void HealthThread::run() noexcept {
  c10::setThreadName("bagua_health");
  std::unique_lock<std::mutex> lock(mutex_);
  // What there is to report is passed on also after a stop, if the store works.
  while (!failure_ && !(isStopping_ && (!report_ || link_.isInTrouble() || link_.isGivenUp()))) {
    lock.unlock();
    try {
      step();
    } catch (...) {
      giveUpStore(messageOf(std::current_exception()));
    }
    lock.lock();
    if (failure_) break;
    // A report is passed on at once; otherwise it is the clock that counts.
    const bool hadReport = report_.has_value();
    const bool wasStopping = isStopping_;
    changed_.wait_for(lock, hadReport ? kReportTick : kTick,
                      [&] { return failure_ || isStopping_ != wasStopping || report_.has_value() != hadReport; });
  }
  lock.unlock();
  link_.disconnect();
  lock.lock();
  hasEnded_ = true;
  changed_.notify_all();
}

void HealthThread::step() {
  if (!link_.isGivenUp()) {
    try {
      const bool wasConnected = link_.board() != nullptr;
      switch (link_.connect()) {
        case StoreLink::State::kConnected: {
          if (!wasConnected) lastLook_ = {};
          const StoreLink::Call call(link_);
          if (hasNews()) look();
          passOnReport();
          break;
        }
        case StoreLink::State::kUnanswered:
          noteTrouble("the store has not answered", /*isOver=*/false);
          break;
        case StoreLink::State::kWaiting:
          break;
      }
    } catch (...) {
      noteTrouble("the store does not answer: " + messageOf(std::current_exception()));
    }
  }
  lookForLost();
  inspectOperations();
}

bool HealthThread::hasNews() {
  const auto now = Clock::now();
  bool isBusy = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    isBusy = report_.has_value() || operations_.hasRunFor(kTick);
  }
  const auto interval = isBusy || roll_.isUnderWay() ? busyLook_ : idleLook_;
  const uint64_t beats = link_.board()->beats(interval);
  // Answers come without a beat.
  const bool awaitsAnswers = roll_.isUnderWay() && now - lastLook_ >= interval;
  // The first time, and now and then in case a beat was lost: its rank, or the store, may have failed in between.
  const bool isDue = now - lastLook_ >= kLongestWithoutLook;
  if (beats == seenBeats_ && !awaitsAnswers && !isDue) return false;
  seenBeats_ = beats;
  lastLook_ = now;
  return true;
}

void HealthThread::look() {
  FailureBoard& board = *link_.board();
  const auto found = board.firstFailure();
  link_.noteRecovery();
  if (found) return setFailure(*found);
  roll_.answer(board);
  roll_.collect(board);
}

void HealthThread::passOnReport() {
  std::optional<Report> due;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    due = report_;
  }
  if (!due) return;
  std::string message = due->message;
  if (due->isSymptom) {
    const auto roll = callTheRoll(due->since, due->since + kCauseTime + kTurnTime);
    const auto waited = Clock::now() - due->since;
    const bool isOfAnother = roll == RollCall::State::kOfAnother;
    if (waited < kCauseTime || (isOfAnother && waited < kCauseTime + 2 * kTurnTime)) return;
    if (!isOfAnother) {
      roll_.collect(*link_.board());
      message += Attendance{.waiting = {}, .absent = {}, .silent = roll_.silent()}.describe();
    }
  }
  tell(message, due->isUrgent);
}

RollCall::State HealthThread::callTheRoll(Clock::time_point notBefore, Clock::time_point takeOverAt) {
  const auto before = roll_.number();
  const auto state = roll_.call(link_.board(), notBefore, takeOverAt);
  // The answers are looked for from now on.
  if (roll_.number() != before) lastLook_ = {};
  return state;
}

void HealthThread::noteTrouble(const std::string& text, bool isOver) {
  bool isInUse = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    isInUse = !operations_.isIdle();
  }
  const bool isGone = link_.noteTrouble(text, isOver, isInUse);
  changed_.notify_all();
  if (isGone) giveUpStore(text);
}

void HealthThread::giveUpStore(const std::string& why) {
  link_.giveUp(why);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    report_.reset();
  }
  changed_.notify_all();
}

void HealthThread::tell(const std::string& message, bool isUrgent) {
  const Failure first = link_.board()->report(message);
  if (!isUrgent && first.rank == group_.rank) std::this_thread::sleep_for(kReadingTime);
  setFailure(first);
}

void HealthThread::failAlone(const std::string& message) {
  std::string why;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    why = whyCutOff();
  }
  setFailure({group_.rank, c10::str(message, " (The other ranks could not be told: ", why, ")")});
}

std::string HealthThread::whyCutOff() const {
  return hasEnded_ && !link_.isGivenUp() ? "the group has been shut down" : link_.whyCutOff();
}

std::string HealthThread::messageOfFailure() const {
  if (failure_->rank == group_.rank) return failure_->message;
  return c10::str("rank ", failure_->rank, " failed first: ", failure_->message);
}

void HealthThread::setFailure(const Failure& first) {
  std::vector<OperationLog::Abort> aborts;
  std::string message;
  bool isInUse = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_) return;
    failure_ = first;
    report_.reset();
    message = messageOfFailure();
    isInUse = !operations_.isIdle();
    aborts = operations_.takeAborts();
  }
  changed_.notify_all();
  for (const auto& abort : aborts) abort(message);
  aborts.clear();
  // After those who wait have been released: a file system can be slow.
  std::string file;
  try {
    file = FlightRecorder::instance().write(globalRank_);
  } catch (...) {
    LOG(WARNING) << "bagua: the last operations could not be written: " << messageOf(std::current_exception());
  }
  const std::string text = c10::str("bagua: rank ", group_.rank, ", group '", group_.name, "': ", message,
                                    file.empty() ? "" : c10::str(" The last operations of this rank are in ", file));
  // To an idle rank it is no error before it communicates again: its peers may be about to end, as it may be itself.
  if (isInUse) {
    LOG(ERROR) << text;
  } else {
    LOG(INFO) << text;
  }
}

}  // namespace bagua
