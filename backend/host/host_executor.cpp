// SPDX-License-Identifier: Apache-2.0
#include "backend/host/host_executor.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <c10/util/thread_name.h>

#include <condition_variable>
#include <deque>

namespace bagua {
namespace {

// How long shutdown() lets submitted programs finish. A peer that is gone may never let them.
constexpr auto kDrainTime = std::chrono::milliseconds(5000);
// How long an aborted transport may take to return.
constexpr auto kAbortTime = std::chrono::milliseconds(100);

std::exception_ptr makeError(const std::string& message) {
  return std::make_exception_ptr(C10_BUILD_ERROR(DistBackendError, message));
}

}  // namespace

struct HostExecutor::Queue {
  struct Entry {
    c10::intrusive_ptr<WorkBagua> work;
    Program program;
    at::ThreadLocalState callerState;
  };

  Queue(GroupIdentity identity, std::unique_ptr<Communicator> transport)
      : group(std::move(identity)), communicator(std::move(transport)) {}

  void run();
  void runProgram(Entry& entry);
  void fail(const std::exception_ptr& cause);
  bool waitIdle(std::chrono::milliseconds limit);

  const GroupIdentity group;
  const std::unique_ptr<Communicator> communicator;

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Entry> entries;
  c10::intrusive_ptr<WorkBagua> running;
  uint64_t nextSequence = 0;
  std::exception_ptr error;
  bool stopping = false;
};

void HostExecutor::Queue::run() {
  c10::setThreadName("bagua_comm");
  const at::NoGradGuard noGrad;
  while (true) {
    Entry entry;
    {
      std::unique_lock<std::mutex> lock(mutex);
      changed.wait(lock, [this] { return stopping || !entries.empty(); });
      if (entries.empty()) return;
      entry = std::move(entries.front());
      entries.pop_front();
      running = entry.work;
    }
    runProgram(entry);
    // Captured tensors go before anybody learns that the executor is idle.
    entry = Entry{};
    {
      const std::lock_guard<std::mutex> lock(mutex);
      running.reset();
    }
    changed.notify_all();
  }
}

void HostExecutor::Queue::runProgram(Entry& entry) {
  const auto& operation = entry.work->operation();
  std::exception_ptr failure;
  try {
    const at::ThreadLocalStateGuard callerState(entry.callerState);
    const at::NoGradGuard noGrad;
    communicator->setDeadline(std::chrono::steady_clock::now() + operation.timeout);
    entry.program(*communicator);
  } catch (...) {
    failure = withContext(std::current_exception(), operation, group);
  }
  entry.program = nullptr;
  if (failure) fail(failure);
  entry.work->complete(failure);
}

// Programs that never ran are failed too: their peers will not get past this one either.
void HostExecutor::Queue::fail(const std::exception_ptr& cause) {
  std::deque<Entry> abandoned;
  c10::intrusive_ptr<WorkBagua> interrupted;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!error) error = cause;
    abandoned.swap(entries);
    interrupted = running;
  }
  if (interrupted) interrupted->complete(cause);
  for (auto& entry : abandoned) entry.work->complete(withContext(cause, entry.work->operation(), group));
  changed.notify_all();
}

bool HostExecutor::Queue::waitIdle(std::chrono::milliseconds limit) {
  std::unique_lock<std::mutex> lock(mutex);
  return changed.wait_for(lock, limit, [this] { return entries.empty() && !running; });
}

HostExecutor::HostExecutor(GroupIdentity group, std::unique_ptr<Communicator> communicator,
                           std::unique_ptr<MessageChannel> messages)
    : group_(group), messages_(std::move(messages)), queue_(std::make_shared<Queue>(group, std::move(communicator))) {}

// Whoever drops an executor without shutdown() may hold the GIL, which a running program can need: no draining here.
HostExecutor::~HostExecutor() { stop(std::chrono::milliseconds(0)); }

c10::intrusive_ptr<c10d::Work> HostExecutor::submit(Operation operation, std::vector<at::Tensor> results,
                                                    Program program) {
  c10::intrusive_ptr<WorkBagua> work;
  {
    const std::lock_guard<std::mutex> lock(queue_->mutex);
    TORCH_CHECK_WITH(DistBackendError, !queue_->stopping, operation.name, " on rank ", group_.rank, ": group '",
                     group_.name, "' has been shut down");
    TORCH_CHECK_WITH(DistBackendError, !queue_->error, operation.name, " on rank ", group_.rank, ": group '",
                     group_.name, "' is unusable since an earlier failure: ", messageOf(queue_->error));
    operation.sequence = queue_->nextSequence++;
    work = c10::make_intrusive<WorkBagua>(group_.rank, operation, std::move(results));
    queue_->entries.push_back({work, std::move(program), at::ThreadLocalState()});
  }
  queue_->changed.notify_all();
  startThread();
  return recordInGroup(std::move(work));
}

void HostExecutor::startThread() {
  const std::lock_guard<std::mutex> lock(threadMutex_);
  if (!thread_.joinable()) thread_ = std::thread([queue = queue_] { queue->run(); });
}

c10::intrusive_ptr<c10d::Work> HostExecutor::send(Operation operation, at::Tensor tensor, int tag) {
  return recordInGroup(messages_->send(operation, std::move(tensor), tag));
}

c10::intrusive_ptr<c10d::Work> HostExecutor::receive(Operation operation, at::Tensor tensor, int tag) {
  return recordInGroup(messages_->receive(operation, std::move(tensor), tag));
}

c10::intrusive_ptr<c10d::Work> HostExecutor::recordInGroup(c10::intrusive_ptr<c10d::Work> work) {
  const std::lock_guard<std::mutex> lock(groupMutex_);
  if (inGroup_) groupParts_.push_back(work);
  return work;
}

void HostExecutor::startGroup() {
  const std::lock_guard<std::mutex> lock(groupMutex_);
  TORCH_CHECK(!inGroup_, "bagua: coalescing has already been started on rank ", group_.rank);
  inGroup_ = true;
}

c10::intrusive_ptr<c10d::Work> HostExecutor::endGroup() {
  const std::lock_guard<std::mutex> lock(groupMutex_);
  TORCH_CHECK(inGroup_, "bagua: end of coalescing without a start on rank ", group_.rank);
  inGroup_ = false;
  return c10::make_intrusive<GroupWork>(group_.rank, std::move(groupParts_));
}

void HostExecutor::abort(const std::string& reason) {
  queue_->communicator->abort();
  queue_->fail(makeError(reason));
}

void HostExecutor::shutdown() { stop(error() ? std::chrono::milliseconds(0) : kDrainTime); }

void HostExecutor::stop(std::chrono::milliseconds drainTime) {
  std::thread thread;
  {
    const std::lock_guard<std::mutex> lock(threadMutex_);
    thread = std::move(thread_);
  }
  bool isIdle = queue_->waitIdle(drainTime);
  if (!isIdle) {
    abort("the group was shut down before the operation had completed");
    isIdle = queue_->waitIdle(kAbortTime);
  }
  {
    const std::lock_guard<std::mutex> lock(queue_->mutex);
    queue_->stopping = true;
  }
  queue_->changed.notify_all();
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

std::exception_ptr HostExecutor::error() const {
  const std::lock_guard<std::mutex> lock(queue_->mutex);
  return queue_->error;
}

uint64_t HostExecutor::submitted() const {
  const std::lock_guard<std::mutex> lock(queue_->mutex);
  return queue_->nextSequence;
}

}  // namespace bagua
