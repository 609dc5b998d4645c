// SPDX-License-Identifier: Apache-2.0
#include "backend/c10d/backend_executors.h"

#include <c10/util/Exception.h>

#include "backend/c10d/backend_communicator.h"
#include "backend/c10d/make_host_executor.h"
#if BAGUA_WITH_CUDA
#include "backend/nccl/nccl_executor.h"
#endif

namespace bagua {

BackendExecutors::BackendExecutors(c10::intrusive_ptr<c10d::Backend> backend, const std::string& groupName,
                                   const std::vector<std::string>& hostIds, std::chrono::milliseconds timeout,
                                   c10::intrusive_ptr<c10d::Store> store, std::vector<uint64_t> globalRanks)
    : backend_(std::move(backend)),
      identity_{groupName, backend_->getRank(), backend_->getSize()},
      topology_(std::make_shared<const HostTopology>(hostIds)),
      timeout_(timeout),
      health_(identity_, std::move(store), std::move(globalRanks)) {
  TORCH_CHECK_VALUE(topology_->size() == identity_.size, "bagua: expected ", identity_.size, " host ids, got ",
                    topology_->size());
}

BackendExecutors::~BackendExecutors() = default;

Executor& BackendExecutors::executorFor(at::Device device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (executor_) {
    TORCH_CHECK_VALUE(*device_ == device, "bagua: a hook serves the tensors of one device, got ", *device_, " and ",
                      device);
    return *executor_;
  }
  if (device.is_cpu()) {
    executor_ = makeHostExecutor(identity_, backend_, topology_, health_);
  } else {
#if BAGUA_WITH_CUDA
    const auto track = health_.addTrack("cuda");
    executor_ =
        makeStreamExecutor(identity_, std::make_unique<BackendCommunicator>(backend_, topology_), device, track);
    endWithGroup(executor_, *track);
#else
    TORCH_CHECK_NOT_IMPLEMENTED(false, "bagua was built without CUDA and cannot communicate gradients on ", device);
#endif
  }
  device_ = device;
  return *executor_;
}

}  // namespace bagua
