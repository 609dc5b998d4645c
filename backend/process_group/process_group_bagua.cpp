// SPDX-License-Identifier: Apache-2.0
#include "backend/process_group/process_group_bagua.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "backend/cpu/make_cpu_executor.h"
#include "backend/operation/timeouts.h"
#include "backend/rendezvous/rank_record.h"
#include "backend/security/job_security.h"
#include "backend/security/sealed_store.h"
#if BAGUA_WITH_CUDA
#include "backend/cuda/nccl_executor.h"
#endif

namespace bagua {
namespace {

using StorePtr = ProcessGroupBagua::StorePtr;

bool deviceOrder(const at::Device& a, const at::Device& b) {
  return std::pair(a.type(), a.index()) < std::pair(b.type(), b.index());
}

}  // namespace

ProcessGroupBagua::ProcessGroupBagua(StorePtr store, int rank, int size, c10::intrusive_ptr<Options> options)
    : Backend(rank, size),
      store_(std::move(store)),
      options_(std::move(options)),
      members_(exchangeRecords(*store_, rank, size, limitedTimeout(options_->timeout))),
      topology_(std::make_shared<const HostTopology>(members_.topology)),
      identity_{options_->group_name, rank, size},
      executors_(deviceOrder) {
  options_->timeout = limitedTimeout(options_->timeout);
  init();
}

ProcessGroupBagua::~ProcessGroupBagua() {
  if (!mark_.isFromParent()) return;
  // Threads that do not exist here would be joined, and the parent's peers be told that it leaves.
  neverDestroy(std::move(executors_));
  neverDestroy(StorePtr(store_));
}

void ProcessGroupBagua::setGroupUid(const std::string& name) {
  Backend::setGroupUid(name);
  identity_.name = name;
}

void ProcessGroupBagua::setTimeout(std::chrono::milliseconds timeout) {
  TORCH_CHECK_VALUE(timeout.count() > 0, "bagua: a timeout must be positive, got ", timeout.count(), " ms");
  options_->timeout = limitedTimeout(timeout);
}

Operation ProcessGroupBagua::operation(c10d::OpType type, const char* name, const at::Tensor& like,
                                       const CallOptions& options, int64_t peer, std::vector<at::Tensor> inputs) const {
  return {.type = type,
          .name = name,
          .dtype = like.scalar_type(),
          .numel = like.numel(),
          .peer = static_cast<int>(peer),
          .timeout = orDefault(options.timeout),
          .inputs = std::move(inputs),
          .isAwaited = options.isAwaited,
          .mayOverlap = true};
}

Operation ProcessGroupBagua::operation(c10d::OpType type, const char* name, const at::Tensor& like,
                                       const CallOptions& options, const c10d::ReduceOp& reduceOp, int64_t peer,
                                       std::vector<at::Tensor> inputs) const {
  Operation reduction = operation(type, name, like, options, peer, std::move(inputs));
  reduction.reduceOp = static_cast<int>(reduceOp.op_);
  return reduction;
}

std::chrono::milliseconds ProcessGroupBagua::orDefault(std::chrono::milliseconds timeout) const {
  // kUnsetTimeout is negative; 0 is a limit that nothing meets.
  return timeout.count() < 0 ? options_->timeout : limitedTimeout(timeout);
}

std::shared_ptr<MessageExecutor> ProcessGroupBagua::makeExecutor(at::Device device) {
  if (!health_) {
    // Below the group's id, which all its ranks have drawn together: no failure of an earlier group of that name is
    // found.
    health_ = std::make_unique<GroupHealth>(
        identity_, c10::make_intrusive<c10d::PrefixStore>(c10::str(members_.id), store_),
        std::vector<uint64_t>(options_->global_ranks_in_group.begin(), options_->global_ranks_in_group.end()));
  }
  if (device.is_cpu()) return makeCpuExecutor(identity_, members_, topology_, *health_, options_->isSerial);
  if (topology_->hostCount() > 1) checkKeepsSecret("NCCL", "Train on CPU tensors, or on one host");
#if BAGUA_WITH_CUDA
  const auto log = health_->addLog("cuda");
  auto executor =
      makeNcclExecutor(identity_, store_, device, topology_, options_->timeout, options_->highPriorityStream, log);
  endWithGroup(executor, *log);
  return executor;
#else
  TORCH_CHECK_NOT_IMPLEMENTED(false, "bagua was built without CUDA and cannot communicate a tensor on ", device,
                              "; rebuild it with a torch that has CUDA (python -m bagua.info tells what was built)");
#endif
}

MessageExecutor& ProcessGroupBagua::executorFor(at::Device device) {
  TORCH_CHECK_WITH(DistBackendError, !mark_.isFromParent(), "bagua on rank ", rank_, ": group '", identity_.name,
                   "' belongs to the process that has forked this one, which is no rank of it");
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK_WITH(DistBackendError, closed_.empty(), "bagua on rank ", rank_, ": ", closed_);
  TORCH_CHECK_VALUE(!coalescedDevice_ || *coalescedDevice_ == device, "bagua on rank ", rank_,
                    ": coalesced operations must be on one device, got ", *coalescedDevice_, " and ", device);
  auto found = executors_.find(device);
  if (found == executors_.end()) found = executors_.emplace(device, makeExecutor(device)).first;
  if (coalescing_ && !coalescedDevice_) {
    coalescedDevice_ = device;
    found->second->startGroup();
  }
  return *found->second;
}

ProcessGroupBagua::Executors ProcessGroupBagua::executors() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return executors_;
}

uint64_t ProcessGroupBagua::getSequenceNumberForGroup() {
  uint64_t sequence = 0;
  for (const auto& [device, executor] : executors()) sequence += executor->submitted();
  return sequence;
}

void ProcessGroupBagua::startCoalescing() {
  const std::lock_guard<std::mutex> lock(mutex_);
  // Forgets a group that was never ended: torch leaves one behind when an operation in it throws.
  coalescing_ = true;
  coalescedDevice_.reset();
}

ProcessGroupBagua::WorkPtr ProcessGroupBagua::endCoalescing() {
  std::shared_ptr<MessageExecutor> executor;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(coalescing_, "bagua on rank ", rank_, ": end of coalescing without a start");
    coalescing_ = false;
    if (!coalescedDevice_) return nullptr;
    executor = executors_.at(*std::exchange(coalescedDevice_, std::nullopt));
  }
  return executor->endGroup();
}

c10::intrusive_ptr<ProcessGroupBagua::Options> ProcessGroupBagua::optionsOf(
    const c10::intrusive_ptr<c10d::Backend::Options>& opts) const {
  auto options = c10::make_intrusive<Options>(*options_);
  if (const auto given = c10::dynamic_intrusive_pointer_cast<Options>(opts)) {
    options = c10::make_intrusive<Options>(*given);
  } else if (opts) {
    options->timeout = opts->timeout;
    options->group_name = opts->group_name;
    options->group_desc = opts->group_desc;
    options->global_ranks_in_group = opts->global_ranks_in_group;
  }
  return options;
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupBagua::split(const StorePtr& store, const std::vector<int>& ranks,
                                                           const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  for (const int rank : ranks) checks("bagua:split").rank(rank, "member");
  const auto self = std::find(ranks.begin(), ranks.end(), rank_);
  if (self == ranks.end()) return nullptr;
  return merge(store, opts, static_cast<int>(self - ranks.begin()), static_cast<int>(ranks.size()));
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupBagua::merge(const StorePtr& store,
                                                           const c10::intrusive_ptr<c10d::Backend::Options>& opts,
                                                           const int& rank, const int& size) {
  // A connection of its own: the new group may block on the store while this one uses it.
  const auto options = optionsOf(opts);
  const auto own = sealedPart(store->clone(), options->group_name);
  return c10::make_intrusive<ProcessGroupBagua>(own, rank, size, options);
}

void ProcessGroupBagua::eagerConnectSingleDevice(at::Device device) { executorFor(device); }

c10d::ErrorType ProcessGroupBagua::getError() {
  for (const auto& [device, executor] : executors()) {
    if (executor->error()) return c10d::ErrorType::COMM_ERROR;
  }
  return c10d::ErrorType::SUCCESS;
}

void ProcessGroupBagua::close(const std::string& reason) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed_.empty()) closed_ = "group '" + identity_.name + "' " + reason;
}

void ProcessGroupBagua::abort() {
  if (mark_.isFromParent()) return;
  close("was aborted");
  for (const auto& [device, executor] : executors()) executor->abort("the group was aborted");
  stopHealth();
}

void ProcessGroupBagua::shutdown() {
  if (mark_.isFromParent()) return;
  close("has been shut down");
  for (const auto& [device, executor] : executors()) executor->shutdown();
  stopHealth();
}

// Not under the mutex: its thread may be about to call an executor.
void ProcessGroupBagua::stopHealth() {
  GroupHealth* health = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    health = health_.get();
  }
  if (health != nullptr) health->stop();
}

}  // namespace bagua
