// SPDX-License-Identifier: Apache-2.0
#include "backend/host/host_executor.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <c10/util/thread_name.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <optional>

#include "backend/host/callback_threads.h"
#include "kernels/share_out.h"

namespace bagua {
namespace {

using std::chrono::milliseconds;

// How long shutdown() lets submitted programs finish. A peer that is gone may never let them.
constexpr milliseconds kDrainTime{5000};
// How long an aborted transport may take to return.
constexpr milliseconds kAbortTime{100};
// How long a thread may take to put away a program that has returned: on a machine with many processes it may not run
// for a while. Not without limit, because what it drops may need the GIL of whoever waits here.
constexpr milliseconds kTidyTime{5000};

std::exception_ptr makeError(const std::string& message) {
  return std::make_exception_ptr(C10_BUILD_ERROR(DistBackendError, message));
}

}  // namespace

// What the executor and its thread share. A Work or a program is never destroyed under the mutex: the last reference to
// a tensor that Python knows takes the GIL, whose owner may be waiting for the mutex.
class HostExecutor::Queue {
 public:
  Queue(GroupIdentity group, Communicators communicators, std::shared_ptr<GroupHealth::Track> health);

  // Also tells the channel.
  std::pair<c10::intrusive_ptr<WorkBagua>, size_t> push(Operation operation, std::vector<at::Tensor> results,
                                                        Program program);
  // Runs the program at once, on this thread, if nothing else is running or waiting; null otherwise. It saves two
  // changes of threads, which take longer than a small exchange in shared memory.
  c10::intrusive_ptr<WorkBagua> runHere(const Operation& operation, const std::vector<at::Tensor>& results,
                                        Program& program);
  // The body of a channel's thread: until close() and the last program.
  void run(size_t channel);
  // Fails what has not completed, and from now on everything. `culprit` is the work that `cause` already names.
  void fail(const std::exception_ptr& cause, const WorkBagua* culprit = nullptr);
  void abortTransport();
  // Tells the other ranks why this one ends what has not completed.
  void reportAbort(const std::string& reason);
  // Refuses new programs.
  void refuse();
  void close();
  bool waitIdle(milliseconds limit);
  [[nodiscard]] bool isBusy(size_t channel);
  // Whether all programs have returned, though the executor is busy with the last one a little longer.
  [[nodiscard]] bool isTidying();
  void checkUsable(const char* operation);
  std::exception_ptr error();
  uint64_t submitted();

 private:
  struct Entry {
    c10::intrusive_ptr<WorkBagua> work;
    Program program;
  };
  struct Channel {
    std::unique_ptr<Communicator> communicator;
    c10::intrusive_ptr<WorkBagua> running = {};
    bool isBusy = false;
    bool isInProgram = false;
    // Has the executor to itself.
    bool isExclusive = false;
  };

  bool next(size_t channel, Entry& entry);
  [[nodiscard]] size_t channelOf(const Entry& entry) const {
    return entry.work->operation().sequence % channels_.size();
  }
  // Under the mutex.
  [[nodiscard]] bool isTurnOf(const Entry& entry) const;
  [[nodiscard]] bool isIdle() const;
  void begin(const Entry& entry);
  void runProgram(Entry& entry);
  void finish(Entry& entry);
  std::exception_ptr explain(const std::exception_ptr& failure, const Operation& operation);
  void complete(const c10::intrusive_ptr<WorkBagua>& work, const std::exception_ptr& error);
  void checkUsableLocked(const char* operation) const;

  const GroupIdentity group_;
  const std::shared_ptr<GroupHealth::Track> health_;
  CallbackThreads callbacks_;

  std::mutex mutex_;
  // For the threads: there is a program for one of them, or no more will come.
  std::condition_variable forThreads_;
  // For waitIdle().
  std::condition_variable idle_;
  std::deque<Entry> entries_;
  std::vector<Channel> channels_;
  bool isRefusing_ = false;
  bool isClosed_ = false;
  uint64_t nextSequence_ = 0;
  std::exception_ptr error_;
};

HostExecutor::Queue::Queue(GroupIdentity group, Communicators communicators, std::shared_ptr<GroupHealth::Track> health)
    : group_(std::move(group)), health_(std::move(health)) {
  for (auto& communicator : communicators) channels_.push_back({.communicator = std::move(communicator)});
}

std::pair<c10::intrusive_ptr<WorkBagua>, size_t> HostExecutor::Queue::push(Operation operation,
                                                                           std::vector<at::Tensor> results,
                                                                           Program program) {
  c10::intrusive_ptr<WorkBagua> work;
  size_t channel = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    checkUsableLocked(operation.name);
    operation.sequence = nextSequence_++;
    work = c10::make_intrusive<WorkBagua>(group_.rank, operation, std::move(results));
    entries_.push_back({work, std::move(program)});
    channel = channelOf(entries_.back());
  }
  forThreads_.notify_all();
  return {work, channel};
}

// In the order of submission, so that no channel waits for a program behind one that waits for it.
bool HostExecutor::Queue::isTurnOf(const Entry& entry) const {
  if (!entry.work->operation().mayOverlap) return isIdle();
  const auto isExclusive = [](const Channel& channel) { return channel.isExclusive; };
  return !channels_[channelOf(entry)].isBusy && std::none_of(channels_.begin(), channels_.end(), isExclusive);
}

bool HostExecutor::Queue::isIdle() const {
  return std::none_of(channels_.begin(), channels_.end(), [](const Channel& channel) { return channel.isBusy; });
}

void HostExecutor::Queue::begin(const Entry& entry) {
  auto& channel = channels_[channelOf(entry)];
  channel.running = entry.work;
  channel.isBusy = true;
  channel.isInProgram = true;
  channel.isExclusive = !entry.work->operation().mayOverlap;
}

void HostExecutor::Queue::abortTransport() {
  for (const auto& channel : channels_) channel.communicator->abort();
}

void HostExecutor::Queue::checkUsable(const char* operation) {
  const std::lock_guard<std::mutex> lock(mutex_);
  checkUsableLocked(operation);
}

void HostExecutor::Queue::checkUsableLocked(const char* operation) const {
  TORCH_CHECK_WITH(DistBackendError, !error_, operation, " on rank ", group_.rank, ": group '", group_.name,
                   "' is unusable since an earlier failure: ", messageOf(error_));
  TORCH_CHECK_WITH(DistBackendError, !isRefusing_, operation, " on rank ", group_.rank, ": group '", group_.name,
                   "' has been shut down");
}

void HostExecutor::Queue::run(size_t channel) {
  c10::setThreadName("bagua_comm");
  // The other intra-op threads are the training's, which goes on.
  const StayOnThread stayOnThread;
  // The callers' thread-local state stays with them: during a backward it holds Python objects, which the transport's
  // threads would drop at a time when they cannot have the GIL.
  const at::NoGradGuard noGrad;
  Entry entry;
  while (next(channel, entry)) {
    runProgram(entry);
    finish(entry);
  }
}

void HostExecutor::Queue::finish(Entry& entry) {
  auto& channel = channels_[channelOf(entry)];
  c10::intrusive_ptr<WorkBagua> finished;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    finished = std::move(channel.running);
  }
  // All that the program held goes before anybody learns that the executor is idle.
  finished.reset();
  entry = Entry{};
  bool isForThreads = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    channel.isBusy = false;
    channel.isExclusive = false;
    isForThreads = isClosed_ || !entries_.empty();
  }
  // Not in vain: a thread would take the processor from a peer.
  if (isForThreads) forThreads_.notify_all();
  idle_.notify_all();
}

c10::intrusive_ptr<WorkBagua> HostExecutor::Queue::runHere(const Operation& operation,
                                                           const std::vector<at::Tensor>& results, Program& program) {
  Entry entry;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    checkUsableLocked(operation.name);
    if (operation.mayOverlap || !isIdle() || !entries_.empty()) return {};
    Operation numbered = operation;
    numbered.sequence = nextSequence_++;
    entry = {c10::make_intrusive<WorkBagua>(group_.rank, numbered, results), std::move(program)};
    begin(entry);
  }
  const auto work = entry.work;
  const at::NoGradGuard noGrad;
  runProgram(entry);
  finish(entry);
  return work;
}

bool HostExecutor::Queue::next(size_t channel, Entry& entry) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto isMine = [&] {
    return !entries_.empty() && channelOf(entries_.front()) == channel && isTurnOf(entries_.front());
  };
  forThreads_.wait(lock, [&] { return isMine() || (isClosed_ && entries_.empty()); });
  if (entries_.empty()) return false;
  entry = std::move(entries_.front());
  entries_.pop_front();
  begin(entry);
  // The one behind it may be another channel's turn.
  if (!entries_.empty()) forThreads_.notify_all();
  return true;
}

void HostExecutor::Queue::runProgram(Entry& entry) {
  auto& channel = channels_[channelOf(entry)];
  auto& communicator = *channel.communicator;
  const auto& operation = entry.work->operation();
  const auto fingerprint = fingerprintOf(operation);
  std::optional<GroupHealth::Track::Token> token;
  std::exception_ptr failure;
  try {
    token = health_->begin(operation, fingerprint);
    communicator.setDeadline(std::chrono::steady_clock::now() + operation.timeout +
                             health_->patience(operation.timeout));
    communicator.setProgram(fingerprint);
    entry.program(communicator);
  } catch (...) {
    failure = explain(std::current_exception(), operation);
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    channel.isInProgram = false;
  }
  if (token) health_->end(*token, failure == nullptr);
  entry.program = nullptr;
  if (failure) {
    fail(failure, entry.work.get());
    // What runs beside it need not wait until its peers have noticed.
    for (const auto& other : channels_) {
      if (&other != &channel) other.communicator->abort();
    }
  } else {
    complete(entry.work, nullptr);
  }
}

std::exception_ptr HostExecutor::Queue::explain(const std::exception_ptr& failure, const Operation& operation) {
  // Aborted: what the transport says then is a consequence.
  if (const auto cause = error()) return withContext(cause, operation, group_);
  return health_->explain(failure, operation);
}

void HostExecutor::Queue::reportAbort(const std::string& reason) {
  if (!error()) health_->reportAbort(reason);
}

void HostExecutor::Queue::complete(const c10::intrusive_ptr<WorkBagua>& work, const std::exception_ptr& error) {
  if (work->complete(error)) callbacks_.run([work] { work->settleFuture(); });
}

// Programs that never ran are failed too: their peers will not get past this one either.
void HostExecutor::Queue::fail(const std::exception_ptr& cause, const WorkBagua* culprit) {
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

void HostExecutor::Queue::refuse() {
  const std::lock_guard<std::mutex> lock(mutex_);
  isRefusing_ = true;
}

void HostExecutor::Queue::close() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    isRefusing_ = true;
    isClosed_ = true;
  }
  forThreads_.notify_all();
  callbacks_.stop();
}

bool HostExecutor::Queue::waitIdle(milliseconds limit) {
  std::unique_lock<std::mutex> lock(mutex_);
  return idle_.wait_for(lock, limit, [this] { return entries_.empty() && isIdle(); });
}

bool HostExecutor::Queue::isBusy(size_t channel) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return channels_[channel].isBusy;
}

bool HostExecutor::Queue::isTidying() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return entries_.empty() &&
         std::none_of(channels_.begin(), channels_.end(), [](const Channel& channel) { return channel.isInProgram; });
}

std::exception_ptr HostExecutor::Queue::error() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

uint64_t HostExecutor::Queue::submitted() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return nextSequence_;
}

HostExecutor::HostExecutor(const GroupIdentity& group, Communicators channels, std::unique_ptr<MessageChannel> messages,
                           std::shared_ptr<GroupHealth::Track> health)
    : group_(group), messages_(std::move(messages)), threads_(channels.size()) {
  if (!health) health = GroupHealth(group, nullptr).addTrack("cpu");
  queue_ = std::make_shared<Queue>(group, std::move(channels), std::move(health));
}

// Whoever drops an executor without shutdown() may hold the GIL, which a running program can need: no draining here.
HostExecutor::~HostExecutor() { stop(milliseconds(0)); }

c10::intrusive_ptr<c10d::Work> HostExecutor::submit(Operation operation, std::vector<at::Tensor> results,
                                                    Program program) {
  if (operation.isAwaited) {
    if (const auto work = queue_->runHere(operation, results, program)) return recordInGroup(work);
  }
  const auto [work, channel] = queue_->push(operation, std::move(results), std::move(program));
  try {
    startThread(channel);
  } catch (...) {
    // Nobody would run it, nor what comes after it.
    queue_->fail(withContext(std::current_exception(), work->operation(), group_));
    throw;
  }
  return recordInGroup(work);
}

void HostExecutor::startThread(size_t channel) {
  const std::lock_guard<std::mutex> lock(threadMutex_);
  auto& thread = threads_.at(channel);
  if (!thread.joinable()) thread = std::thread([queue = queue_, channel] { queue->run(channel); });
}

c10::intrusive_ptr<c10d::Work> HostExecutor::send(Operation operation, at::Tensor tensor, int tag) {
  queue_->checkUsable(operation.name);
  return recordInGroup(messages_->send(operation, std::move(tensor), tag));
}

c10::intrusive_ptr<c10d::Work> HostExecutor::receive(Operation operation, at::Tensor tensor, int tag) {
  queue_->checkUsable(operation.name);
  return recordInGroup(messages_->receive(operation, std::move(tensor), tag));
}

c10::intrusive_ptr<c10d::Work> HostExecutor::recordInGroup(const c10::intrusive_ptr<c10d::Work>& work) {
  const std::lock_guard<std::mutex> lock(groupMutex_);
  if (inGroup_) groupParts_.push_back(work);
  return work;
}

void HostExecutor::startGroup() {
  std::vector<c10::intrusive_ptr<c10d::Work>> leftOver;
  const std::lock_guard<std::mutex> lock(groupMutex_);
  leftOver.swap(groupParts_);
  inGroup_ = true;
}

c10::intrusive_ptr<c10d::Work> HostExecutor::endGroup() {
  std::vector<c10::intrusive_ptr<c10d::Work>> parts;
  {
    const std::lock_guard<std::mutex> lock(groupMutex_);
    TORCH_CHECK(inGroup_, "bagua: end of coalescing without a start on rank ", group_.rank);
    inGroup_ = false;
    parts.swap(groupParts_);
  }
  return c10::make_intrusive<GroupWork>(group_.rank, std::move(parts));
}

void HostExecutor::abort(const std::string& reason) {
  queue_->reportAbort(reason);
  queue_->fail(makeError(reason));
  if (messages_) messages_->abort();
  queue_->abortTransport();
}

void HostExecutor::shutdown() { stop(error() ? milliseconds(0) : kDrainTime); }

void HostExecutor::stop(milliseconds drainTime) {
  queue_->refuse();
  const auto waitWhileTidying = [this] { return queue_->isTidying() && queue_->waitIdle(kTidyTime); };
  if (!queue_->waitIdle(drainTime) && !waitWhileTidying()) {
    abort("the group was shut down before the operation had completed");
    if (!queue_->waitIdle(kAbortTime)) waitWhileTidying();
  }
  // A message that no peer answers would hold up whoever waits for it, up to its own timeout.
  if (messages_) messages_->abort();
  // Peers that still wait for this rank are to know, though somebody may hold the group for long: a hook, for one.
  queue_->abortTransport();
  queue_->close();
  std::vector<std::thread> threads(threads_.size());
  {
    const std::lock_guard<std::mutex> lock(threadMutex_);
    threads.swap(threads_);
  }
  for (size_t channel = 0; channel < threads.size(); ++channel) {
    auto& thread = threads[channel];
    if (!thread.joinable()) continue;
    if (!queue_->isBusy(channel) && thread.get_id() != std::this_thread::get_id()) {
      thread.join();
    } else {
      // Blocked in a transport that cannot be interrupted. It holds the queue and ends with the operation's timeout.
      LOG(WARNING) << "bagua: rank " << group_.rank << " of group '" << group_.name
                   << "' leaves a communication thread behind: its operation has not returned";
      thread.detach();
    }
  }
}

std::exception_ptr HostExecutor::error() const { return queue_->error(); }

uint64_t HostExecutor::submitted() const { return queue_->submitted(); }

}  // namespace bagua
