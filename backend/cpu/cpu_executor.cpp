// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/cpu_executor.h"

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>

#include "backend/operation/backend_error.h"

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

}  // namespace

CpuExecutor::CpuExecutor(const GroupIdentity& group, Communicators channels, std::unique_ptr<Messenger> messenger,
                         std::shared_ptr<OperationLog> health)
    : group_(group),
      messenger_(std::move(messenger)),
      monitoredBarrier_(messenger_ ? &messenger_->messages() : nullptr, group.rank, group.size),
      threads_(channels.size()) {
  if (!health) health = GroupHealth(group, nullptr).addLog("cpu");
  queue_ = std::make_shared<ProgramQueue>(group, std::move(channels), std::move(health));
}

// Whoever drops an executor without shutdown() may hold the GIL, which a running program can need: no draining here.
CpuExecutor::~CpuExecutor() { stop(milliseconds(0)); }

c10::intrusive_ptr<c10d::Work> CpuExecutor::submit(Operation operation, std::vector<at::Tensor> results,
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

void CpuExecutor::startThread(size_t channel) {
  const std::lock_guard<std::mutex> lock(threadMutex_);
  auto& thread = threads_.at(channel);
  if (!thread.joinable()) thread = std::thread([queue = queue_, channel] { queue->run(channel); });
}

c10::intrusive_ptr<c10d::Work> CpuExecutor::send(Operation operation, at::Tensor tensor, int tag) {
  queue_->checkUsable(operation.name);
  return recordInGroup(messenger_->send(operation, std::move(tensor), tag));
}

c10::intrusive_ptr<c10d::Work> CpuExecutor::receive(Operation operation, at::Tensor tensor, int tag) {
  queue_->checkUsable(operation.name);
  return recordInGroup(messenger_->receive(operation, std::move(tensor), tag));
}

c10::intrusive_ptr<c10d::Work> CpuExecutor::recordInGroup(const c10::intrusive_ptr<c10d::Work>& work) {
  const std::lock_guard<std::mutex> lock(groupMutex_);
  if (inGroup_) groupParts_.push_back(work);
  return work;
}

void CpuExecutor::monitoredBarrier(milliseconds timeout, bool waitAllRanks) {
  queue_->checkUsable("bagua:monitored_barrier");
  monitoredBarrier_.pass(queue_->submitted(), timeout, waitAllRanks);
}

void CpuExecutor::startGroup() {
  dropGroup();
  const std::lock_guard<std::mutex> lock(groupMutex_);
  inGroup_ = true;
}

void CpuExecutor::dropGroup() {
  std::vector<c10::intrusive_ptr<c10d::Work>> parts;
  const std::lock_guard<std::mutex> lock(groupMutex_);
  parts.swap(groupParts_);
  inGroup_ = false;
}

c10::intrusive_ptr<c10d::Work> CpuExecutor::endGroup() {
  std::vector<c10::intrusive_ptr<c10d::Work>> parts;
  {
    const std::lock_guard<std::mutex> lock(groupMutex_);
    TORCH_CHECK(inGroup_, "bagua: end of coalescing without a start on rank ", group_.rank);
    inGroup_ = false;
    parts.swap(groupParts_);
  }
  return c10::make_intrusive<GroupWork>(group_.rank, std::move(parts));
}

void CpuExecutor::abort(const std::string& reason) {
  queue_->reportAbort(reason);
  queue_->fail(makeBackendError(reason));
  if (messenger_) messenger_->abort();
  queue_->abortTransport();
}

void CpuExecutor::shutdown() { stop(error() ? milliseconds(0) : kDrainTime); }

void CpuExecutor::stop(milliseconds drainTime) {
  queue_->refuse();
  const auto waitWhileTidying = [this] { return queue_->isTidying() && queue_->waitIdle(kTidyTime); };
  if (!queue_->waitIdle(drainTime) && !waitWhileTidying()) {
    abort("the group was shut down before the operation had completed");
    if (!queue_->waitIdle(kAbortTime)) waitWhileTidying();
  }
  // A message that no peer answers would hold up whoever waits for it, up to its own timeout.
  if (messenger_) messenger_->abort();
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

}  // namespace bagua
