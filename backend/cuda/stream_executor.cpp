// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/stream_executor.h"

#include <c10/util/Exception.h>

#include <utility>

#include "backend/cuda/device_thread.h"
#include "backend/operation/backend_error.h"

namespace bagua {
namespace {

using std::chrono::milliseconds;

// How long shutdown() lets submitted programs finish. A peer that is gone may never let them.
constexpr milliseconds kTimeToFinish{5000};
// How long the ends of communicators may take together, and then the last release of tensors.
constexpr milliseconds kCloseTime{5000};
constexpr milliseconds kTimeToStop{1000};

}  // namespace

StreamExecutor::StreamExecutor(GroupIdentity group, Channels channels, at::Device device,
                               std::shared_ptr<OperationLog> health)
    : group_(std::move(group)),
      device_(device),
      programChannels_(std::move(channels)),
      turns_(programChannels_.size()),
      channels_(std::make_shared<ChannelSet>([device] { prepareDeviceThread(device); })),
      health_(health ? std::move(health) : GroupHealth(group_, nullptr).addLog("cuda")),
      watchdog_(
          group_, channels_, [device] { prepareDeviceThread(device); }, health_) {
  TORCH_CHECK(device_.is_cuda() && device_.has_index(), "expected a CUDA device with an index, got ", device_);
  TORCH_CHECK(!programChannels_.empty() && programChannels_.size() <= ChannelTurns::kMostChannels,
              "expected one channel or ", ChannelTurns::kMostChannels, ", got ", programChannels_.size());
  int position = 0;
  for (const auto& channel : programChannels_) channels_->add(--position, channel);
}

// Whoever drops an executor without shutdown() may hold the GIL: no draining here.
StreamExecutor::~StreamExecutor() {
  channels_->dropBorrowed();
  if (!watchdog_.isIdle())
    watchdog_.fail(makeBackendError("the group was destroyed before the operation had completed"));
}

void StreamExecutor::checkUsable(const Operation& operation) const {
  TORCH_CHECK_WITH(DistBackendError, !isShutDown_, operation.name, " on rank ", group_.rank, ": group '", group_.name,
                   "' has been shut down");
  const auto error = watchdog_.error();
  TORCH_CHECK_WITH(DistBackendError, !error, operation.name, " on rank ", group_.rank, ": group '", group_.name,
                   "' is unusable since an earlier failure: ", messageOf(error));
}

c10::intrusive_ptr<WorkCuda> StreamExecutor::launch(Launch launch) {
  std::exception_ptr failure;
  {
    const std::lock_guard<std::mutex> order(programsMutex_);
    failure = programChannels_.size() == 1 ? enqueueOn(*programChannels_.front(), launch) : enqueueInTurn(launch);
  }
  return follow(launch, failure);
}

c10::intrusive_ptr<WorkCuda> StreamExecutor::launchOn(StreamChannel& channel, Launch launch) {
  const std::exception_ptr failure = enqueueOn(channel, launch);
  return follow(launch, failure);
}

std::exception_ptr StreamExecutor::enqueueInTurn(Launch& launch) {
  checkUsable(launch.operation);
  const bool isCaptured = isCapturingOn(device_);
  const bool mayOverlap = launch.operation.mayOverlap && !isCaptured;
  const auto turn = isCaptured ? ChannelTurns::ofCaptured()
                               : turns_.next(mayOverlap, MemoryUse(launch.operation.inputs, launch.results));
  try {
    if (turn.waitsForOther) {
      auto behind = programChannels_.at(1 - turn.channel)->behindAll();
      if (behind) launch.after.push_back(*std::move(behind));
    }
    return enqueueOn(*programChannels_.at(turn.channel), launch);
  } catch (...) {
    turns_.takeBack(mayOverlap);
    throw;
  }
}

std::exception_ptr StreamExecutor::enqueueOn(StreamChannel& channel, Launch& launch) {
  const std::lock_guard<std::mutex> order(channel.order());
  checkUsable(launch.operation);
  launch.operation.sequence = nextSequence_;
  if (launch.work) {
    launch.work->describeAs(launch.operation, std::move(launch.results));
  } else {
    launch.work = c10::make_intrusive<WorkCuda>(group_, launch.operation, device_, std::move(launch.results));
  }
  const std::exception_ptr failure = channel.enqueue(*launch.work, std::move(launch.program), std::move(launch.after));
  nextSequence_ += launch.numbers;
  return failure;
}

c10::intrusive_ptr<WorkCuda> StreamExecutor::follow(const Launch& launch, const std::exception_ptr& failure) {
  const auto& work = launch.work;
  if (failure) {
    const auto error = health_->explain(failure, work->operation());
    work->fail(error);
    watchdog_.fail(error);
  }
  keepCaptured(work);
  using Kind = OperationLog::Kind;
  if (!work->isCaptured()) watchdog_.watch(work, launch.numbers == 0 ? Kind::kMessage : Kind::kProgram);
  work->publish();
  return work;
}

void StreamExecutor::keepCaptured(const c10::intrusive_ptr<WorkCuda>& work) {
  std::vector<c10::intrusive_ptr<WorkCuda>> released;
  const std::lock_guard<std::mutex> lock(capturedMutex_);
  if (work->isCaptured()) {
    captured_.push_back(work);
  } else {
    released.swap(captured_);
  }
}

c10::intrusive_ptr<c10d::Work> StreamExecutor::submit(Operation operation, std::vector<at::Tensor> results,
                                                      Program program) {
  return launch(
      {.operation = operation, .results = std::move(results), .program = std::move(program), .work = {}, .after = {}});
}

void StreamExecutor::abort(const std::string& reason) {
  if (!watchdog_.error()) health_->reportAbort(reason);
  watchdog_.fail(makeBackendError(reason));
}

void StreamExecutor::shutdown() {
  if (isShutDown_.exchange(true)) return;
  channels_->dropBorrowed();
  if (!watchdog_.error()) {
    if (watchdog_.waitIdle(kTimeToFinish)) {
      channels_->close(std::chrono::steady_clock::now() + kCloseTime);
    } else {
      abort("the group was shut down before the operation had completed");
    }
  }
  watchdog_.stop(kTimeToStop);
  const std::lock_guard<std::mutex> lock(capturedMutex_);
  captured_.clear();
}

std::exception_ptr StreamExecutor::error() const { return watchdog_.error(); }

std::shared_ptr<Executor> makeStreamExecutor(GroupIdentity group, std::unique_ptr<Communicator> communicator,
                                             at::Device device, std::shared_ptr<OperationLog> health) {
  auto channel =
      std::make_shared<StreamChannel>(std::move(communicator), /*owned=*/nullptr, device, /*isHighPriority=*/false);
  return std::make_shared<StreamExecutor>(std::move(group), StreamExecutor::Channels{std::move(channel)}, device,
                                          std::move(health));
}

}  // namespace bagua
