// SPDX-License-Identifier: Apache-2.0
#include "backend/process_group/backend_executors.h"

#include <c10/util/Exception.h>

#include "backend/operation/timeouts.h"
#include "backend/rendezvous/rank_record.h"
#include "backend/security/job_security.h"
#if BAGUA_WITH_CUDA
#include "backend/cpu/make_cpu_executor.h"
#include "backend/cuda/backend_communicator.h"
#include "backend/cuda/stream_executor.h"
#endif

namespace bagua {

BackendExecutors::BackendExecutors(c10::intrusive_ptr<c10d::Backend> backend, const std::string& groupName,
                                   const std::vector<std::string>& records, std::chrono::milliseconds timeout,
                                   std::vector<uint64_t> globalRanks)
    : backend_(std::move(backend)),
      identity_{groupName, backend_->getRank(), backend_->getSize()},
      topology_(std::make_shared<const HostTopology>(membersOf(records).topology)),
      timeout_(limitedTimeout(timeout)),
      health_(identity_, /*store=*/nullptr, std::move(globalRanks)) {
  TORCH_CHECK_VALUE(topology_->size() == identity_.size, "bagua: expected the records of ", identity_.size,
                    " ranks, got ", topology_->size());
  if (topology_->hostCount() > 1) {
    checkKeepsSecret("a hook on a group of another backend", "Make the group with backend 'bagua'");
  }
}

BackendExecutors::~BackendExecutors() {
  if (!mark_.isFromParent()) return;
  neverDestroy(std::move(executor_));
  neverDestroy(c10::intrusive_ptr<c10d::Backend>(backend_));
}

void BackendExecutors::shutdown() {
  if (mark_.isFromParent()) return;
  std::shared_ptr<Executor> executor;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    executor = executor_;
  }
  if (executor) executor->shutdown();
}

std::shared_ptr<Executor> BackendExecutors::executorFor(at::Device device) {
  TORCH_CHECK_WITH(DistBackendError, !mark_.isFromParent(), "bagua: group '", identity_.name,
                   "' belongs to the process that has forked this one, which is no rank of it");
  const std::lock_guard<std::mutex> lock(mutex_);
  if (executor_) {
    TORCH_CHECK_VALUE(*device_ == device, "bagua: a hook serves the tensors of one device, got ", *device_, " and ",
                      device);
    return executor_;
  }
#if BAGUA_WITH_CUDA
  const auto log = health_.addLog("cuda");
  auto communicator = std::make_unique<BackendCommunicator>(backend_, topology_, device);
  executor_ = makeStreamExecutor(identity_, std::move(communicator), device, log);
  endWithGroup(executor_, *log);
  device_ = device;
  return executor_;
#else
  TORCH_CHECK_NOT_IMPLEMENTED(false, "bagua was built without CUDA and cannot communicate gradients on ", device);
#endif
}

}  // namespace bagua
