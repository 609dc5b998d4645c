// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/nccl_executor.h"

#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "backend/config.h"
#include "backend/cuda/device_thread.h"
#include "backend/cuda/nccl_bootstrap.h"
#include "backend/operation/backend_error.h"

namespace bagua {
namespace {

void checkNotCapturing(at::Device device) {
  TORCH_CHECK(!isCapturingOn(device),
              "an NCCL communicator cannot be made while a CUDA graph is captured: make the same call once before");
}

std::shared_ptr<StreamChannel> makeChannel(const NcclExecutor::Options& options, const std::string& key,
                                           const NcclMembers& members, std::shared_ptr<const HostTopology> topology) {
  auto bootstrap = std::make_shared<NcclBootstrap>(options.api, options.store, key, members);
  auto communicator = std::make_unique<NcclCommunicator>(
      members.self, static_cast<int>(members.ranks.size()), std::move(topology),
      NcclCommunicator::Environment{
          .api = options.api,
          .device = options.device,
          .connect =
              [bootstrap, device = options.device, timeout = options.timeout](NcclHandle& handle) {
                checkNotCapturing(device);
                bootstrap->connect(handle, timeout);
              },
          .currentStream = [device =
                                options.device] { return c10::cuda::getCurrentCUDAStream(device.index()).stream(); },
          .timeout = options.timeout,
          .prepareThread = [device = options.device] { prepareDeviceThread(device); },
      });
  NcclCommunicator* owned = communicator.get();
  return std::make_shared<StreamChannel>(std::move(communicator), owned, options.device, options.isHighPriority);
}

StreamExecutor::Channels makeChannels(const GroupIdentity& group, const NcclExecutor::Options& options) {
  NcclMembers members{.groupName = group.name,
                      .ranks = std::vector<int>(group.size),
                      .self = group.rank,
                      .spansHosts = options.topology->hostCount() > 1};
  std::iota(members.ranks.begin(), members.ranks.end(), 0);
  StreamExecutor::Channels channels;
  for (int channel = 0; channel < options.channels; ++channel) {
    channels.push_back(
        makeChannel(options, channel == 0 ? "all" : c10::str("all/", channel), members, options.topology));
  }
  return channels;
}

}  // namespace

NcclExecutor::NcclExecutor(const GroupIdentity& group, Options options, std::shared_ptr<OperationLog> health)
    : StreamExecutor(group, makeChannels(group, options), options.device, std::move(health)),
      options_(std::move(options)) {}

c10::intrusive_ptr<c10d::Work> NcclExecutor::submit(Operation operation, std::vector<at::Tensor> results,
                                                    Program program) {
  Step step{operation, std::move(program), {}};
  if (auto work = defer(step, results)) return work;
  return StreamExecutor::submit(operation, std::move(results), std::move(step.program));
}

c10::intrusive_ptr<c10d::Work> NcclExecutor::send(Operation operation, at::Tensor tensor, int /*tag*/) {
  return message(operation, tensor, /*isSend=*/true);
}

c10::intrusive_ptr<c10d::Work> NcclExecutor::receive(Operation operation, at::Tensor tensor, int /*tag*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(operation.peer != kAnySource, operation.name, " on rank ", group().rank, ", group '",
                              group().name,
                              "': NCCL (CUDA tensors) cannot receive from any source; name the source rank");
  return message(operation, tensor, /*isSend=*/false);
}

c10::intrusive_ptr<c10d::Work> NcclExecutor::message(const Operation& operation, const at::Tensor& tensor,
                                                     bool isSend) {
  const int self = group().rank;
  TORCH_CHECK_VALUE(operation.peer >= 0 && operation.peer < group().size, operation.name, " on rank ", self,
                    ": there is no rank ", operation.peer, " in group '", group().name, "' of ", group().size);
  checkUsable(operation);
  Step step{operation, {}, {{isSend, operation.peer, tensor}}};
  if (auto work = defer(step, {tensor})) return work;
  TORCH_CHECK_VALUE(operation.peer != self, operation.name, " on rank ", self, ", group '", group().name,
                    "': a message to oneself needs a group (batch_isend_irecv) that holds both its sides");
  const NcclCommunicator::Message side{isSend, operation.peer < self ? 0 : 1, tensor};
  const auto channel = pairChannel(operation.peer);
  return launchOn(*channel,
                  {.operation = operation,
                   .results = {tensor},
                   .program = [side](Communicator& pair) { static_cast<NcclCommunicator&>(pair).exchange({side}); },
                   .numbers = 0,
                   .work = {},
                   .after = {}});
}

std::shared_ptr<StreamChannel> NcclExecutor::pairChannel(int peer) {
  const std::lock_guard<std::mutex> lock(pairsMutex_);
  auto& channel = pairs_[peer];
  if (!channel) {
    const auto [low, high] = std::minmax(group().rank, peer);
    const NcclMembers members{.groupName = group().name,
                              .ranks = {low, high},
                              .self = group().rank == low ? 0 : 1,
                              .spansHosts = options_.topology->hostOf(low) != options_.topology->hostOf(high)};
    channel = makeChannel(options_, c10::str("pair/", low, ":", high), members,
                          std::make_shared<const HostTopology>(HostTopology::oneRankPerHost(2)));
    // In this order every rank ends its pairs by their lower rank, then by their higher one.
    addChannel(peer, channel);
  }
  return channel;
}

void NcclExecutor::startGroup() {
  const Operation operation{.type = c10d::OpType::COALESCED, .name = "bagua:coalesced"};
  auto next = std::make_unique<Group>();
  next->work = c10::make_intrusive<WorkCuda>(group(), operation, device(), std::vector<at::Tensor>{});
  dropGroup();
  const std::lock_guard<std::mutex> lock(groupMutex_);
  group_ = std::move(next);
}

void NcclExecutor::dropGroup() {
  std::unique_ptr<Group> dropped;
  {
    const std::lock_guard<std::mutex> lock(groupMutex_);
    dropped.swap(group_);
  }
  if (!dropped) return;
  dropped->work->fail(makeBackendError(describe(dropped->work->operation(), group()) + ": the group was never ended"));
  dropped->work->publish();
}

c10::intrusive_ptr<c10d::Work> NcclExecutor::defer(Step& step, const std::vector<at::Tensor>& results) {
  const std::lock_guard<std::mutex> lock(groupMutex_);
  if (!group_) return nullptr;
  at::cuda::CUDAEvent ready;
  ready.record(c10::cuda::getCurrentCUDAStream(device().index()));
  group_->ready.push_back(std::move(ready));
  group_->results.insert(group_->results.end(), results.begin(), results.end());
  if (!step.program && !group_->steps.empty() && !group_->steps.back().program) {
    auto& messages = group_->steps.back().messages;
    messages.insert(messages.end(), step.messages.begin(), step.messages.end());
    auto& timeout = group_->steps.back().operation.timeout;
    timeout = std::max(timeout, step.operation.timeout);
  } else {
    group_->steps.push_back(std::move(step));
  }
  return group_->work;
}

StreamExecutor::Launch NcclExecutor::launchOf(Group group) {
  Operation operation = group.work->operation();
  // A group of one thing is that thing.
  if (group.steps.size() == 1 && group.steps.front().messages.size() <= 1) operation = group.steps.front().operation;
  // It takes no turn: only some of the ranks may have messages in it.
  operation.mayOverlap = false;
  uint64_t programs = 0;
  for (const auto& step : group.steps) {
    operation.timeout = std::max(operation.timeout, step.operation.timeout);
    if (step.program) ++programs;
  }
  auto run = [steps = std::move(group.steps)](Communicator& communicator) {
    for (const auto& step : steps) {
      if (step.program) {
        step.program(communicator);
      } else {
        static_cast<NcclCommunicator&>(communicator).exchange(step.messages);
      }
    }
  };
  return {.operation = operation,
          .results = std::move(group.results),
          .program = std::move(run),
          .numbers = programs,
          .work = std::move(group.work),
          .after = std::move(group.ready)};
}

c10::intrusive_ptr<c10d::Work> NcclExecutor::endGroup() {
  std::unique_ptr<Group> group;
  {
    const std::lock_guard<std::mutex> lock(groupMutex_);
    TORCH_CHECK(group_, "bagua: end of coalescing without a start on rank ", this->group().rank);
    group = std::move(group_);
  }
  const auto work = group->work;
  try {
    return launch(launchOf(std::move(*group)));
  } catch (...) {
    // Its Work is in other hands already.
    work->fail(withContext(std::current_exception(), work->operation(), this->group()));
    work->publish();
    throw;
  }
}

std::shared_ptr<MessageExecutor> makeNcclExecutor(const GroupIdentity& group,
                                                  const c10::intrusive_ptr<c10d::Store>& store, at::Device device,
                                                  const std::shared_ptr<const HostTopology>& topology,
                                                  std::chrono::milliseconds timeout, bool highPriorityStream,
                                                  std::shared_ptr<OperationLog> health) {
  NcclExecutor::Options options{.api = NcclApi::library(),
                                .store = store,
                                .device = device,
                                .topology = topology,
                                .timeout = timeout,
                                .isHighPriority = highPriorityStream,
                                .channels = topology->hostCount() > 1 ? config::ncclChannels() : 1};
  return std::make_shared<NcclExecutor>(group, std::move(options), std::move(health));
}

}  // namespace bagua
