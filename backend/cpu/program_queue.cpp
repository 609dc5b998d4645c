// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/program_queue.h"

#include <c10/util/Exception.h>
#include <c10/util/thread_name.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "backend/operation/peer_errors.h"
#include "backend/operation/program_mode.h"
#include "kernels/share_out.h"

namespace bagua {

ProgramQueue::ProgramQueue(GroupIdentity group, Communicators communicators, std::shared_ptr<OperationLog> health)
    : group_(std::move(group)), health_(std::move(health)) {
  for (auto& communicator : communicators) channels_.push_back({.communicator = std::move(communicator)});
}

ProgramQueue::Accepted ProgramQueue::push(Operation operation, std::vector<at::Tensor> results, Program program) {
  c10::intrusive_ptr<WorkBagua> work;
  size_t channel = 0;
  MemoryUse memory(operation.inputs, results);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    checkUsableLocked(operation.name);
    operation.sequence = nextSequence_++;
    operation.mayOverlap = operation.mayOverlap && memory.isKnown();
    work = c10::make_intrusive<WorkBagua>(group_.rank, operation, std::move(results));
    entries_.push_back({work, std::move(program), std::move(memory)});
    channel = channelOf(entries_.back());
    wakeNext();
  }
  return {work, channel};
}

c10::intrusive_ptr<WorkBagua> ProgramQueue::runHere(const Operation& operation, const std::vector<at::Tensor>& results,
                                                    Program& program) {
  Entry entry;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    checkUsableLocked(operation.name);
    if (!isIdle() || !entries_.empty()) return {};
    Operation numbered = operation;
    numbered.sequence = nextSequence_++;
    // Whoever submits meanwhile, on another thread, waits.
    numbered.mayOverlap = false;
    entry = {c10::make_intrusive<WorkBagua>(group_.rank, numbered, results), std::move(program)};
    begin(entry);
  }
  auto work = entry.work;
  runProgram(entry);
  finish(entry);
  return work;
}

void ProgramQueue::run(size_t channel) {
  c10::setThreadName("bagua_comm");
  // The other intra-op threads are the training's, which goes on.
  const StayOnThread stayOnThread;
  Entry entry;
  while (next(channel, entry)) {
    runProgram(entry);
    finish(entry);
  }
}

bool ProgramQueue::next(size_t channel, Entry& entry) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto isMine = [&] {
    return !entries_.empty() && channelOf(entries_.front()) == channel && isTurnOf(entries_.front());
  };
  channels_[channel].turn->wait(lock, [&] { return isMine() || (isClosed_ && entries_.empty()); });
  if (entries_.empty()) return false;
  entry = std::move(entries_.front());
  entries_.pop_front();
  begin(entry);
  wakeNext();
  return true;
}

// Only whose turn it is: there may be many threads.
void ProgramQueue::wakeNext() {
  if (!entries_.empty() && isTurnOf(entries_.front())) channels_[channelOf(entries_.front())].turn->notify_one();
}

void ProgramQueue::wakeAll() {
  for (const auto& channel : channels_) channel.turn->notify_all();
}

// In the order of submission, so that no channel waits for a program behind one that waits for it.
bool ProgramQueue::isTurnOf(const Entry& entry) const {
  if (!entry.work->operation().mayOverlap) return isIdle();
  const auto isInTheWay = [&](const Channel& channel) {
    return channel.isBusy && (channel.isExclusive || channel.memory.conflictsWith(entry.memory));
  };
  return !channels_[channelOf(entry)].isBusy && std::ranges::none_of(channels_, isInTheWay);
}

bool ProgramQueue::isIdle() const {
  return std::ranges::none_of(channels_, [](const Channel& channel) { return channel.isBusy; });
}

void ProgramQueue::begin(const Entry& entry) {
  auto& channel = channels_[channelOf(entry)];
  channel.running = entry.work;
  channel.memory = entry.memory;
  channel.isBusy = true;
  channel.isInProgram = true;
  channel.isExclusive = !entry.work->operation().mayOverlap;
}

void ProgramQueue::runProgram(Entry& entry) {
  auto& channel = channels_[channelOf(entry)];
  auto& communicator = *channel.communicator;
  const auto& operation = entry.work->operation();
  const auto fingerprint = fingerprintOf(operation);
  std::optional<OperationLog::Token> token;
  std::exception_ptr failure;
  bool isInStep = true;
  try {
    token = health_->begin(operation, fingerprint);
    communicator.setDeadline(std::chrono::steady_clock::now() + operation.timeout +
                             health_->patience(operation.timeout));
    communicator.setProgram(fingerprint);
    // All of the callers' thread-local state that comes along: during a backward it holds Python objects, which the
    // transport's threads would drop at a time when they cannot have the GIL.
    const ProgramMode mode(entry.work->results());
    entry.program(communicator);
  } catch (const RefusedError&) {
    failure = withContext(std::current_exception(), operation, group_);
  } catch (...) {
    isInStep = false;
    failure = explain(std::current_exception(), operation);
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    channel.isInProgram = false;
  }
  if (token) health_->end(*token, failure == nullptr);
  entry.program = nullptr;
  if (!isInStep) {
    fail(failure, entry.work.get());
    // What runs beside it need not wait until its peers have noticed.
    for (const auto& other : channels_) {
      if (&other != &channel) other.communicator->abort();
    }
  } else {
    complete(entry.work, failure);
  }
}

void ProgramQueue::finish(Entry& entry) {
  auto& channel = channels_[channelOf(entry)];
  c10::intrusive_ptr<WorkBagua> finished;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    finished = std::move(channel.running);
  }
  // All that the program held goes before anybody learns that the queue is idle.
  finished.reset();
  entry = Entry{};
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    channel.isBusy = false;
    channel.isExclusive = false;
    wakeNext();
    if (isClosed_) wakeAll();
  }
  idle_.notify_all();
}

std::exception_ptr ProgramQueue::explain(const std::exception_ptr& failure, const Operation& operation) {
  // Aborted: what the transport says then is a consequence.
  if (const auto cause = error()) return withContext(cause, operation, group_);
  return health_->explain(failure, operation);
}

void ProgramQueue::complete(const c10::intrusive_ptr<WorkBagua>& work, const std::exception_ptr& error) {
  if (work->complete(error)) callbacks_.run([work] { work->settleFuture(); });
}

// Programs that never ran are failed too: their peers will not get past this one either.
void ProgramQueue::fail(const std::exception_ptr& cause, const WorkBagua* culprit) {
  std::deque<Entry> abandoned;
  std::vector<c10::intrusive_ptr<WorkBagua>> interrupted;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!error_) error_ = cause;
    abandoned.swap(entries_);
    for (const auto& channel : channels_) {
      if (channel.running) interrupted.push_back(channel.running);
    }
  }
  for (const auto& work : interrupted) {
    complete(work, work.get() == culprit ? cause : withContext(cause, work->operation(), group_));
  }
  for (const auto& entry : abandoned) complete(entry.work, withContext(cause, entry.work->operation(), group_));
  idle_.notify_all();
}

void ProgramQueue::abortTransport() {
  for (const auto& channel : channels_) channel.communicator->abort();
}

void ProgramQueue::reportAbort(const std::string& reason) {
  if (!error()) health_->reportAbort(reason);
}

void ProgramQueue::refuse() {
  const std::lock_guard<std::mutex> lock(mutex_);
  isRefusing_ = true;
}

void ProgramQueue::close() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    isRefusing_ = true;
    isClosed_ = true;
    wakeAll();
  }
  callbacks_.stop();
}

void ProgramQueue::checkUsable(const char* operation) {
  const std::lock_guard<std::mutex> lock(mutex_);
  checkUsableLocked(operation);
}

void ProgramQueue::checkUsableLocked(const char* operation) const {
  TORCH_CHECK_WITH(DistBackendError, !error_, operation, " on rank ", group_.rank, ": group '", group_.name,
                   "' is unusable since an earlier failure: ", messageOf(error_));
  TORCH_CHECK_WITH(DistBackendError, !isRefusing_, operation, " on rank ", group_.rank, ": group '", group_.name,
                   "' has been shut down");
}

bool ProgramQueue::waitIdle(std::chrono::milliseconds limit) {
  std::unique_lock<std::mutex> lock(mutex_);
  return idle_.wait_for(lock, limit, [this] { return entries_.empty() && isIdle(); });
}

bool ProgramQueue::isBusy(size_t channel) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return channels_[channel].isBusy;
}

bool ProgramQueue::isTidying() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return entries_.empty() &&
         std::ranges::none_of(channels_, [](const Channel& channel) { return channel.isInProgram; });
}

std::exception_ptr ProgramQueue::error() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

uint64_t ProgramQueue::submitted() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return nextSequence_;
}

}  // namespace bagua
