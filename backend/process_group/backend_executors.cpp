// SPDX-License-Identifier: Apache-2.0
#include "backend/process_group/backend_executors.h"

#include <c10/util/Exception.h>

#include "backend/cpu/make_cpu_executor.h"
#include "backend/cuda/backend_communicator.h"
#include "backend/operation/timeouts.h"
#include "backend/rendezvous/rank_record.h"
#include "backend/security/job_security.h"
#include "backend/security/sealed_store.h"
#if BAGUA_WITH_CUDA
#include "backend/cuda/nccl_executor.h"
#endif

namespace bagua {

BackendExecutors::BackendExecutors(c10::intrusive_ptr<c10d::Backend> backend, const std::string& groupName,
                                   const std::vector<std::string>& records, std::chrono::milliseconds timeout,
                                   c10::intrusive_ptr<c10d::Store> store, std::vector<uint64_t> globalRanks,
                                   bool isSerial)
    : backend_(std::move(backend)),
      identity_{groupName, backend_->getRank(), backend_->getSize()},
      members_(membersOf(records)),
      topology_(std::make_shared<const HostTopology>(members_.topology)),
      timeout_(limitedTimeout(timeout)),
      isSerial_(isSerial),
      health_(identity_, sealedPart(store, groupName), std::move(globalRanks)) {
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

Executor& BackendExecutors::executorFor(at::Device device) {
  TORCH_CHECK_WITH(DistBackendError, !mark_.isFromParent(), "bagua: group '", identity_.name,
                   "' belongs to the process that has forked this one, which is no rank of it");
  const std::lock_guard<std::mutex> lock(mutex_);
  if (executor_) {
    TORCH_CHECK_VALUE(*device_ == device, "bagua: a hook serves the tensors of one device, got ", *device_, " and ",
                      device);
    return *executor_;
  }
  if (device.is_cpu()) {
    executor_ = makeCpuExecutor(
        identity_, members_, topology_, [this] { return backend_; }, health_, isSerial_);
  } else {
#if BAGUA_WITH_CUDA
    const auto log = health_.addLog("cuda");
    executor_ = makeStreamExecutor(identity_, std::make_unique<BackendCommunicator>(backend_, topology_), device, log);
    endWithGroup(executor_, *log);
#else
    TORCH_CHECK_NOT_IMPLEMENTED(false, "bagua was built without CUDA and cannot communicate gradients on ", device);
#endif
  }
  device_ = device;
  return *executor_;
}

}  // namespace bagua
