// SPDX-License-Identifier: Apache-2.0
#include "backend/host/host_executor.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <c10/util/thread_name.h>

#include <condition_variable>
#include <deque>
#include <optional>

#include "backend/host/callback_threads.h"

namespace bagua {
namespace {

using std::chrono::milliseconds;

// How long shutdown() lets submitted programs finish. A peer that is gone may never let them.
constexpr milliseconds kDrainTime{5000};
// How long an aborted transport may take to return.
constexpr milliseconds kAbortTime{100};
// How long the thread may take to put away a program that has returned: on a machine with many processes it may not run
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
  Queue(GroupIdentity group, std::unique_ptr<Communicator> communicator, std::shared_ptr<GroupHealth::Track> health)
      : group_(std::move(group)), communicator_(std::move(communicator)), health_(std::move(health)) {}

  c10::intrusive_ptr<WorkBagua> push(Operation operation, std::vector<at::Tensor> results, Program program);
  // Runs the program at once, on this thread, if nothing else is running or waiting; null otherwise. It saves two
  // changes of threads, which take longer than a small exchange in shared memory.
  c10::intrusive_ptr<WorkBagua> runHere(const Operation& operation, const std::vector<at::Tensor>& results,
                                        Program& program);
  // The body of the thread: until close() and the last program.
  void run();
  // Fails what has not completed, and from now on everything. `culprit` is the work that `cause` already names.
  void fail(const std::exception_ptr& cause, const WorkBagua* culprit = nullptr);
  void abortTransport() { communicator_->abort(); }
  // Tells the other ranks why this one ends what has not completed.
  void reportAbort(const std::string& reason);
  // Refuses new programs.
  void refuse();
  void close();
  bool waitIdle(milliseconds limit);
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

  bool next(Entry& entry);
  void runProgram(Entry& entry);
  void finish(Entry& entry);
  std::exception_ptr explain(const std::exception_ptr& failure, const Operation& operation);
  void complete(const c10::intrusive_ptr<WorkBagua>& work, const std::exception_ptr& error);
  void checkUsableLocked(const char* operation) const;

  const GroupIdentity group_;
  const std::unique_ptr<Communicator> communicator_;
  const std::shared_ptr<GroupHealth::Track> health_;
  CallbackThreads callbacks_;

  std::mutex mutex_;
  // For the thread: there is a program for it, or no more will come.
  std::condition_variable forThread_;
  // For waitIdle().
  std::condition_variable idle_;
  std::deque<Entry> entries_;
  c10::intrusive_ptr<WorkBagua> running_;
  bool isBusy_ = false;
  bool isInProgram_ = false;
  bool isRefusing_ = false;
  bool isClosed_ = false;
  uint64_t nextSequence_ = 0;
  std::exception_ptr error_;
};

c10::intrusive_ptr<WorkBagua> HostExecutor::Queue::push(Operation operation, std::vector<at::Tensor> results,
                                                        Program program) {
  c10::intrusive_ptr<WorkBagua> work;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    checkUsableLocked(operation.name);
    operation.sequence = nextSequence_++;
    work = c10::make_intrusive<WorkBagua>(group_.rank, operation, std::move(results));
    entries_.push_back({work, std::move(program)});
  }
  forThread_.notify_one();
  return work;
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

void HostExecutor::Queue::run() {
  c10::setThreadName("bagua_comm");
  // The callers' thread-local state stays with them: during a backward it holds Python objects, which the transport's
  // threads would drop at a time when they cannot have the GIL.
  const at::NoGradGuard noGrad;
  Entry entry;
  while (next(entry)) {
    runProgram(entry);
    finish(entry);
  }
}

void HostExecutor::Queue::finish(Entry& entry) {
  c10::intrusive_ptr<WorkBagua> finished;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    finished = std::move(running_);
  }
  // All that the program held goes before anybody learns that the executor is idle.
  finished.reset();
  entry = Entry{};
  bool isForThread = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    isBusy_ = false;
    isForThread = isClosed_ || !entries_.empty();
  }
  // Not in vain: the thread would take the processor from a peer.
  if (isForThread) forThread_.notify_one();
  idle_.notify_all();
}

c10::intrusive_ptr<WorkBagua> HostExecutor::Queue::runHere(const Operation& operation,
                                                           const std::vector<at::Tensor>& results, Program& program) {
  Entry entry;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    checkUsableLocked(operation.name);
    if (isBusy_ || !entries_.empty()) return {};
    Operation numbered = operation;
    numbered.sequence = nextSequence_++;
    entry = {c10::make_intrusive<WorkBagua>(group_.rank, numbered, results), std::move(program)};
    running_ = entry.work;
    isBusy_ = true;
    isInProgram_ = true;
  }
  const auto work = entry.work;
  const at::NoGradGuard noGrad;
  runProgram(entry);
  finish(entry);
  return work;
}

bool HostExecutor::Queue::next(Entry& entry) {
  std::unique_lock<std::mutex> lock(mutex_);
  // Busy: a caller runs a program itself.
  forThread_.wait(lock, [this] { return !isBusy_ && (isClosed_ || !entries_.empty()); });
  if (entries_.empty()) return false;
  entry = std::move(entries_.front());
  entries_.pop_front();
  running_ = entry.work;
  isBusy_ = true;
  isInProgram_ = true;
  return true;
}

void HostExecutor::Queue::runProgram(Entry& entry) {
  const auto& operation = entry.work->operation();
  const auto fingerprint = fingerprintOf(operation);
  std::optional<GroupHealth::Track::Token> token;
  std::exception_ptr failure;
  try {
    token = health_->begin(operation, fingerprint);
    communicator_->setDeadline(std::chrono::steady_clock::now() + operation.timeout +
                               health_->patience(operation.timeout));
    communicator_->setProgram(fingerprint);
    entry.program(*communicator_);
  } catch (...) {
    failure = explain(std::current_exception(), operation);
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    isInProgram_ = false;
  }
  if (token) health_->end(*token, failure == nullptr);
  entry.program = nullptr;
  if (failure) {
    fail(failure, entry.work.get());
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
  c10::intrusive_ptr<WorkBagua> interrupted;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!error_) error_ = cause;
    abandoned.swap(entries_);
    interrupted = running_;
  }
  if (interrupted) {
    complete(interrupted, interrupted.get() == culprit ? cause : withContext(cause, interrupted->operation(), group_));
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
  forThread_.notify_one();
  callbacks_.stop();
}

bool HostExecutor::Queue::waitIdle(milliseconds limit) {
  std::unique_lock<std::mutex> lock(mutex_);
  return idle_.wait_for(lock, limit, [this] { return entries_.empty() && !isBusy_; });
}

bool HostExecutor::Queue::isTidying() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return entries_.empty() && !isInProgram_;
}

std::exception_ptr HostExecutor::Queue::error() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

uint64_t HostExecutor::Queue::submitted() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return nextSequence_;
}

HostExecutor::HostExecutor(const GroupIdentity& group, std::unique_ptr<Communicator> communicator,
                           std::unique_ptr<MessageChannel> messages, std::shared_ptr<GroupHealth::Track> health)
    : group_(group), messages_(std::move(messages)) {
  if (!health) health = GroupHealth(group, nullptr).addTrack("cpu");
  queue_ = std::make_shared<Queue>(group, std::move(communicator), std::move(health));
}

// Whoever drops an executor without shutdown() may hold the GIL, which a running program can need: no draining here.
HostExecutor::~HostExecutor() { stop(milliseconds(0)); }

c10::intrusive_ptr<c10d::Work> HostExecutor::submit(Operation operation, std::vector<at::Tensor> results,
                                                    Program program) {
  if (operation.isAwaited) {
    if (const auto work = queue_->runHere(operation, results, program)) return recordInGroup(work);
  }
  const auto work = queue_->push(operation, std::move(results), std::move(program));
  startThread();
  return recordInGroup(work);
}

void HostExecutor::startThread() {
  const std::lock_guard<std::mutex> lock(threadMutex_);
  if (!thread_.joinable()) thread_ = std::thread([queue = queue_] { queue->run(); });
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
  bool isIdle = queue_->waitIdle(drainTime) || waitWhileTidying();
  if (!isIdle) {
    abort("the group was shut down before the operation had completed");
    isIdle = queue_->waitIdle(kAbortTime) || waitWhileTidying();
  }
  queue_->close();
  std::thread thread;
  {
    const std::lock_guard<std::mutex> lock(threadMutex_);
    thread = std::move(thread_);
  }
  if (!thread.joinable()) return;
  if (isIdle && thread.get_id() != std::this_thread::get_id()) {
    thread.join();
  } else {
    // Blocked in a transport that cannot be interrupted. It holds the queue and ends with the operation's timeout.
    LOG(WARNING) << "bagua: rank " << group_.rank << " of group '" << group_.name
                 << "' leaves a communication thread behind: its operation has not returned";
    thread.detach();
  }
}

std::exception_ptr HostExecutor::error() const { return queue_->error(); }

uint64_t HostExecutor::submitted() const { return queue_->submitted(); }

}  // namespace bagua
