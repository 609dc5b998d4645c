// SPDX-License-Identifier: Apache-2.0
#include "backend/process_group/group_epoch.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "backend/config.h"
#include "backend/cpu/make_cpu_executor.h"
#include "backend/security/job_security.h"
#if BAGUA_WITH_CUDA
#include "backend/cuda/nccl_executor.h"
#endif

namespace bagua {
namespace {

bool deviceOrder(const at::Device& a, const at::Device& b) {
  return std::pair(a.type(), a.index()) < std::pair(b.type(), b.index());
}

bool hasError(const GroupEpoch::Executors& executors) {
  return std::ranges::any_of(executors, [](const auto& known) { return known.second->error() != nullptr; });
}

}  // namespace

GroupEpoch::GroupEpoch(StorePtr store, GroupMembers members, GroupIdentity identity,
                       c10::intrusive_ptr<GroupOptions> options, std::vector<uint64_t> globalRanks, bool survivesDeaths)
    : store_(std::move(store)),
      options_(std::move(options)),
      globalRanks_(std::move(globalRanks)),
      survivesDeaths_(survivesDeaths),
      members_(std::move(members)),
      topology_(std::make_shared<const HostTopology>(members_.topology)),
      identity_(std::move(identity)),
      executors_(deviceOrder) {}

GroupEpoch::~GroupEpoch() {
  if (!mark_.isFromParent()) return;
  // Threads that do not exist here would be joined, and the parent's peers be told that it leaves.
  neverDestroy(std::move(executors_));
  neverDestroy(StorePtr(store_));
}

GroupIdentity GroupEpoch::identity() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return identity_;
}

void GroupEpoch::rename(const std::string& name) {
  const std::lock_guard<std::mutex> lock(mutex_);
  identity_.name = name;
}

GroupHealth& GroupEpoch::health() {
  if (!health_) {
    // Below the epoch's id: no failure of an earlier group of that name is found.
    health_ =
        std::make_unique<GroupHealth>(identity_, c10::make_intrusive<c10d::PrefixStore>(c10::str(members_.id), store_),
                                      globalRanks_, GroupHealth::kStorePatience, survivesDeaths_);
  }
  return *health_;
}

std::shared_ptr<MessageExecutor> GroupEpoch::makeExecutor(at::Device device) {
  GroupHealth& health = this->health();
  if (device.is_cpu()) return makeCpuExecutor(identity_, members_, topology_, health, options_->isSerial);
  if (topology_->hostCount() > 1 && config::ncclNet() == false) {
    checkKeepsSecret("NCCL, with BAGUA_NCCL_NET=0,", "Unset BAGUA_NCCL_NET on all ranks");
  }
#if BAGUA_WITH_CUDA
  const auto log = health.addLog("cuda");
  // A group has an executor for each device that a rank uses. Every rank makes them in the same order, and counts them
  // itself: a store that does not answer would keep this mutex.
  const auto ordinal = std::ranges::count_if(executors_, [](const auto& known) { return known.first.is_cuda(); });
  const auto part = c10::make_intrusive<c10d::PrefixStore>(c10::str("nccl/", ordinal), store_);
  auto executor =
      makeNcclExecutor(identity_, part, device, topology_, options_->timeout, options_->highPriorityStream, log);
  endWithGroup(executor, *log);
  return executor;
#else
  TORCH_CHECK_NOT_IMPLEMENTED(false, "bagua was built without CUDA and cannot communicate a tensor on ", device,
                              "; rebuild it with a torch that has CUDA (python -m bagua.info tells what was built)");
#endif
}

std::shared_ptr<MessageExecutor> GroupEpoch::executorFor(at::Device device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK_WITH(DistBackendError, closed_.empty(), "bagua on rank ", identity_.rank, ": group '", identity_.name,
                   "' ", closed_);
  TORCH_CHECK_VALUE(!coalescedDevice_ || *coalescedDevice_ == device, "bagua on rank ", identity_.rank,
                    ": coalesced operations must be on one device, got ", *coalescedDevice_, " and ", device);
  auto found = executors_.find(device);
  if (found == executors_.end()) found = executors_.emplace(device, makeExecutor(device)).first;
  if (coalescing_ == Coalescing::kOpen && !coalescedDevice_) {
    coalescedDevice_ = device;
    found->second->startGroup();
  }
  return found->second;
}

GroupEpoch::Executors GroupEpoch::executors() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return executors_;
}

void GroupEpoch::startCoalescing() {
  const std::lock_guard<std::mutex> lock(mutex_);
  coalescing_ = Coalescing::kOpen;
  coalescedDevice_.reset();
}

std::shared_ptr<MessageExecutor> GroupEpoch::closeCoalescing(Coalescing state) {
  coalescing_ = state;
  return coalescedDevice_ ? executors_.at(*std::exchange(coalescedDevice_, std::nullopt)) : nullptr;
}

c10::intrusive_ptr<c10d::Work> GroupEpoch::endCoalescing() {
  std::shared_ptr<MessageExecutor> executor;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(coalescing_ != Coalescing::kNone, "bagua on rank ", identity_.rank,
                ": end of coalescing without a start");
    executor = closeCoalescing(Coalescing::kNone);
  }
  return executor ? executor->endGroup() : nullptr;
}

void GroupEpoch::dropCoalescing() {
  std::shared_ptr<MessageExecutor> executor;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (coalescing_ == Coalescing::kOpen) executor = closeCoalescing(Coalescing::kDropped);
  }
  if (executor) executor->dropGroup();
}

bool GroupEpoch::hasFailed() const {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!closed_.empty()) return hadFailed_;
  }
  return hasError(executors());
}

void GroupEpoch::close(const std::string& how) {
  const bool failed = hasError(executors());
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!closed_.empty()) return;
  closed_ = how;
  hadFailed_ = failed;
}

void GroupEpoch::abort(const std::string& how) {
  if (survivesDeaths_) {
    const std::lock_guard<std::mutex> lock(mutex_);
    try {
      // Members may wait for one that leaves before its first operation.
      if (executors_.empty() && closed_.empty()) health().addLog("cpu")->reportAbort("the group " + how);
    } catch (const std::exception& error) {
      LOG(WARNING) << "bagua: the others cannot be told that the group " << how << ": " << error.what();
    }
  }
  close(how);
  for (const auto& [device, executor] : executors()) executor->abort("the group " + how);
  stopHealth();
}

void GroupEpoch::shutdown() {
  close("has been shut down");
  for (const auto& [device, executor] : executors()) executor->shutdown();
  stopHealth();
}

// Not under the mutex: its thread may be about to call an executor.
void GroupEpoch::stopHealth() {
  GroupHealth* health = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    health = health_.get();
  }
  if (health != nullptr) health->stop();
}

}  // namespace bagua
