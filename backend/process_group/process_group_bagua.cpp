// SPDX-License-Identifier: Apache-2.0
#include "backend/process_group/process_group_bagua.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "backend/operation/timeouts.h"
#include "backend/security/sealed_store.h"

namespace bagua {
namespace {

ProcessGroupBagua::MeetAfresh& meeting() {
  static ProcessGroupBagua::MeetAfresh made = [](const auto& store, int /*rank*/, int /*size*/, auto /*timeout*/) {
    return sealedStore(store);
  };
  return made;
}

}  // namespace

ProcessGroupBagua::ProcessGroupBagua(StorePtr store, int rank, int size, c10::intrusive_ptr<Options> options)
    : Backend(rank, size), options_(std::move(options)) {
  options_->timeout = limitedTimeout(options_->timeout);
  if (!options_->waitsForReconfigure) {
    const auto& ranks = options_->global_ranks_in_group;
    const auto records = std::exchange(options_->records, {});
    auto members =
        records.empty() ? exchangeRecords(*store, rank, size, options_->timeout) : membersHere(*store, rank, records);
    current_ = std::make_shared<GroupEpoch>(
        std::move(store), std::move(members), GroupIdentity{options_->group_name, rank, size}, options_,
        std::vector<uint64_t>(ranks.begin(), ranks.end()), /*survivesDeaths=*/false);
  }
  init();
}

ProcessGroupBagua::~ProcessGroupBagua() = default;

std::shared_ptr<GroupEpoch> ProcessGroupBagua::currentOrNull() const {
  // Another thread of the parent may have held the mutex.
  if (mark_.isFromParent()) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex_);
  return current_;
}

void ProcessGroupBagua::checkIsOwn() const {
  TORCH_CHECK_WITH(DistBackendError, !mark_.isFromParent(), "bagua on rank ", rank_, ": group '", options_->group_name,
                   "' belongs to the process that has forked this one, which is no rank of it");
}

std::shared_ptr<GroupEpoch> ProcessGroupBagua::current() const {
  checkIsOwn();
  auto present = currentOrNull();
  TORCH_CHECK_WITH(DistBackendError, present, "bagua on rank ", rank_, ": group '", options_->group_name,
                   "' was made with enable_reconfigure=True and has no members before the first reconfigure()");
  return present;
}

uint64_t ProcessGroupBagua::epoch() const {
  const auto present = currentOrNull();
  return present ? present->id() : 0;
}

ProcessGroupBagua::StorePtr ProcessGroupBagua::reconfiguredStore() const {
  if (mark_.isFromParent()) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex_);
  return isReconfigured_ ? current_->store() : nullptr;
}

GroupIdentity ProcessGroupBagua::identity() const {
  const auto present = currentOrNull();
  return present ? present->identity() : GroupIdentity{options_->group_name, rank_, size_};
}

void ProcessGroupBagua::setGroupUid(const std::string& name) {
  Backend::setGroupUid(name);
  options_->group_name = name;
  if (const auto present = currentOrNull()) present->rename(name);
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

std::shared_ptr<MessageExecutor> ProcessGroupBagua::messageExecutorFor(at::Device device) {
  return current()->executorFor(device);
}

uint64_t ProcessGroupBagua::getSequenceNumberForGroup() {
  uint64_t sequence = 0;
  if (const auto present = currentOrNull()) {
    for (const auto& [device, executor] : present->executors()) sequence += executor->submitted();
  }
  return sequence;
}

void ProcessGroupBagua::startCoalescing() { current()->startCoalescing(); }

ProcessGroupBagua::WorkPtr ProcessGroupBagua::endCoalescing() { return current()->endCoalescing(); }

void ProcessGroupBagua::dropCoalescing() {
  if (const auto present = currentOrNull()) present->dropCoalescing();
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
  options->waitsForReconfigure = false;
  return options;
}

std::vector<uint64_t> ProcessGroupBagua::globalRanks(const std::vector<int>& ranks) const {
  const auto& known = options_->global_ranks_in_group;
  const bool isKnown = known.size() == static_cast<size_t>(size_);
  std::vector<uint64_t> named;
  for (const int rank : ranks) named.push_back(isKnown ? known[rank] : static_cast<uint64_t>(rank));
  return named;
}

void ProcessGroupBagua::useMeeting(MeetAfresh meetAfresh) { meeting() = std::move(meetAfresh); }

c10::intrusive_ptr<c10d::Backend> ProcessGroupBagua::newGroup(const std::string& name, const StorePtr& store, int rank,
                                                              int size, const c10::intrusive_ptr<Options>& options) {
  // A connection of its own: the new group may block on the store while its parent uses it.
  const auto part = c10::make_intrusive<c10d::PrefixStore>(name, store->clone());
  return c10::make_intrusive<ProcessGroupBagua>(meeting()(part, rank, size, options->timeout), rank, size, options);
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupBagua::split(const StorePtr& store, const std::vector<int>& ranks,
                                                           const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  for (const int rank : ranks) checks("bagua:split").rank(rank, "member");
  const auto self = std::ranges::find(ranks, rank_);
  if (self == ranks.end()) return nullptr;
  const auto options = optionsOf(opts);
  options->global_ranks_in_group = globalRanks(ranks);
  return newGroup(options->group_name, store, static_cast<int>(self - ranks.begin()), static_cast<int>(ranks.size()),
                  options);
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupBagua::merge(const StorePtr& store,
                                                           const c10::intrusive_ptr<c10d::Backend::Options>& opts,
                                                           const int& rank, const int& size) {
  const auto options = optionsOf(opts);
  // This group does not know what the job calls the ranks of the others.
  options->global_ranks_in_group.clear();
  return newGroup(options->group_name, store, rank, size, options);
}

void ProcessGroupBagua::eagerConnectSingleDevice(at::Device device) { executorFor(device); }

c10::intrusive_ptr<c10d::Backend> ProcessGroupBagua::shrinkTo(const std::vector<int64_t>& excluded, int flags,
                                                              const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  constexpr int kAbort = 1;  // torch.distributed.SHRINK_ABORT
  const std::set<int64_t> without(excluded.begin(), excluded.end());
  for (const int64_t rank : without) checks("bagua:shrink").rank(rank, "excluded rank");
  TORCH_CHECK_VALUE(!without.contains(rank_), checks("bagua:shrink").where(), ": this rank is among the excluded");
  const auto present = current();
  if ((flags & kAbort) != 0) present->abort("was aborted by shrink_group");
  const auto rank = static_cast<int>(rank_ - std::distance(without.begin(), without.lower_bound(rank_)));
  const auto size = static_cast<int>(static_cast<size_t>(size_) - without.size());
  const auto options = optionsOf(opts);
  std::vector<int> left;
  for (int former = 0; former < size_; ++former) {
    if (!without.contains(former)) left.push_back(former);
  }
  options->global_ranks_in_group = globalRanks(left);
  return newGroup(c10::str("shrunk/", c10::Join("-", without)), present->store(), rank, size, options);
}

c10d::ErrorType ProcessGroupBagua::getError() {
  const auto present = currentOrNull();
  return present && present->hasFailed() ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
}

void ProcessGroupBagua::endAttempt(const char* how) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (attempt_) attempt_->endByCall(how);
}

void ProcessGroupBagua::abort() {
  if (mark_.isFromParent()) return;
  endAttempt("was aborted");
  if (const auto present = currentOrNull()) present->abort("was aborted");
}

void ProcessGroupBagua::shutdown() {
  if (mark_.isFromParent()) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    isShutDown_ = true;
  }
  endAttempt("was shut down");
  if (const auto present = currentOrNull()) present->shutdown();
}

}  // namespace bagua
