// SPDX-License-Identifier: Apache-2.0
// Change of a group's members without a new object.
#include "backend/process_group/process_group_bagua.h"

#if BAGUA_HAS_RECONFIGURE

#include <algorithm>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "backend/operation/timeouts.h"
#include "backend/process_group/change_attempt.h"
#include "backend/rendezvous/member_handle.h"
#include "backend/security/sealed_store.h"

namespace bagua {
namespace {

using Handles = std::vector<c10d::ReconfigureHandle>;
using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

// By rank. A set has no order: then it is that of the texts, which is the same everywhere.
Handles orderedHandles(const c10d::ReconfigureOptions& opts) {
  Handles handles;
  std::visit([&](const auto& given) { handles.assign(given.begin(), given.end()); }, opts.handles);
  TORCH_CHECK_VALUE(!handles.empty(), "bagua:reconfigure: there has to be at least one handle");
  Handles sorted = handles;
  std::ranges::sort(sorted);
  const auto twice = std::ranges::adjacent_find(sorted);
  TORCH_CHECK_VALUE(twice == sorted.end(), "bagua:reconfigure: handles have to be unique, and ", *twice,
                    " comes more than once");
  return std::holds_alternative<Handles>(opts.handles) ? handles : sorted;
}

// As the flight recorder names the ranks: as they were first, or by their places where several were the same.
std::vector<uint64_t> firstRanks(const std::vector<MemberHandle>& members) {
  std::vector<uint64_t> ranks;
  ranks.reserve(members.size());
  for (const auto& member : members) ranks.push_back(member.rank);
  const std::set<uint64_t> distinct(ranks.begin(), ranks.end());
  return distinct.size() == ranks.size() ? ranks : std::vector<uint64_t>();
}

// Members that were told different ones would wait for each other until the timeout.
void checkThatHandlesAgree(c10d::Store& store, const Handles& handles, int rank, std::chrono::milliseconds timeout,
                           const ChangeAttempt& attempt) {
  const std::string own = c10::Join(" ", handles);
  const std::string key = "handles";
  if (rank == 0) return store.set(key, own);
  try {
    store.wait({key}, timeout);
  } catch (const std::exception&) {
    attempt.check();
    TORCH_CHECK_WITH(DistBackendError, false, "bagua:reconfigure: rank ", rank, " of the new ", handles.size(),
                     " waited ", timeout.count(), " ms for its rank 0, ", handles.front(),
                     ", which lives but did not call reconfigure() with the same uuid");
  }
  const std::string first = store.get_to_str(key);
  TORCH_CHECK_VALUE(first == own, "bagua:reconfigure: rank 0 was given the members ", first, ", and rank ", rank, " ",
                    own);
}

constexpr const char* kBegun = "begun";
// Rank 0 adds this to the number of those who gave up when it decides. It is more than there are members.
constexpr int64_t kDecided = int64_t{1} << 32U;
// Its word follows within this time, and less than who has ended the attempt waits for (see meetInTime).
constexpr std::chrono::milliseconds kUntilWord{150};

// Throws unless rank 0 has said that all members begin.
void checkBegun(c10d::Store& store, int rank, int size) {
  TORCH_CHECK_WITH(DistBackendError, store.get_to_str(kBegun) == "yes", "bagua:reconfigure: rank ", rank,
                   " of the new ", size, " has come when the others had given up");
}

// All members begin, or none: a member that comes when others have given up finds what they left in the store, and
// would go on alone.
void beginTogether(c10d::Store& store, int rank, int size, Deadline deadline, const ChangeAttempt& attempt) {
  constexpr std::chrono::milliseconds kPause{2};
  const std::string met = "met";
  const std::string left = "left";
  const std::string begun = kBegun;
  // Who has given up is not to be counted, if only for a moment.
  if (rank != 0) attempt.check();
  store.add(met, 1);
  if (rank == 0) {
    const auto isInTime = [&] { return Clock::now() < deadline && !attempt.hasEnded(); };
    const auto haveMet = [&] { return store.add(met, 0) >= size && store.add(left, 0) == 0; };
    bool isComplete = haveMet();
    for (; !isComplete && isInTime(); isComplete = haveMet()) std::this_thread::sleep_for(kPause);
    // If this process was stopped, others have given up without being able to say so.
    isComplete = isComplete && isInTime() && store.add(left, kDecided) == kDecided;
    store.set(begun, isComplete ? std::string("yes") : "no");
    if (!isComplete) attempt.check();
    TORCH_CHECK_WITH(DistBackendError, isComplete, "bagua:reconfigure: only ", store.add(met, 0), " of the new ", size,
                     " members, without ", store.add(left, 0) % kDecided, " who gave up, have come in time");
    return;
  }
  try {
    store.wait({begun}, leftUntil(deadline));
  } catch (const std::exception&) {
    // The others begin if rank 0 has decided already, and would wait for this one if it did not begin, too.
    const bool isDecided = store.add(left, 1) > kDecided;
    for (const auto end = Clock::now() + kUntilWord; isDecided && Clock::now() < end && !store.check({begun});) {
      std::this_thread::sleep_for(kPause);
    }
    if (store.check({begun})) return checkBegun(store, rank, size);
    attempt.check();
    TORCH_CHECK_WITH(DistBackendError, false, "bagua:reconfigure: rank ", rank, " of the new ", size,
                     " did not hear in time that all members have come");
  }
  checkBegun(store, rank, size);
}

c10::intrusive_ptr<c10d::Work> completedWork() {
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  future->markCompleted(c10::IValue(std::vector<at::Tensor>()));
  return c10d::Work::create_from_future(future);
}

// Ends an earlier epoch, where after a failure nobody may be left to answer.
void leave(GroupEpoch& epoch) {
  if (epoch.hasFailed()) return epoch.abort("was reconfigured");
  epoch.shutdown();
}

}  // namespace

c10d::ReconfigureHandle ProcessGroupBagua::get_reconfigure_handle() const {
  checkIsOwn();
  const std::lock_guard<std::mutex> lock(handleMutex_);
  if (handle_.empty()) {
    const auto& ranks = options_->global_ranks_in_group;
    const auto rank = static_cast<size_t>(rank_);
    handle_ = MemberHandle::draw(rank < ranks.size() ? static_cast<int>(ranks[rank]) : rank_).toString();
  }
  return handle_;
}

ProcessGroupBagua::WorkPtr ProcessGroupBagua::reconfigure(const c10d::ReconfigureOptions& opts) {
  checkIsOwn();
  const std::lock_guard<std::mutex> onlyOne(reconfiguring_);
  const auto timeout = limitedTimeout(opts.timeout.value_or(options_->timeout));
  const Handles handles = orderedHandles(opts);
  std::vector<MemberHandle> members;
  members.reserve(handles.size());
  for (const auto& handle : handles) members.push_back(MemberHandle::parse(handle));
  const auto own = std::ranges::find(handles, get_reconfigure_handle());
  TORCH_CHECK_VALUE(own != handles.end(), "bagua:reconfigure: this member's own handle, ", get_reconfigure_handle(),
                    ", is not among the ", handles.size(), " given");
  // What an attempt with it has left in the store would be found.
  TORCH_CHECK(usedUuids_.insert(opts.uuid).second, "bagua:reconfigure: uuid ", opts.uuid,
              " was already used; every call needs one of its own");

  const auto rank = static_cast<int>(own - handles.begin());
  const auto size = static_cast<int>(handles.size());
  const auto attempt = std::make_shared<ChangeAttempt>();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK_WITH(DistBackendError, !isShutDown_, "bagua:reconfigure: group '", options_->group_name,
                     "' has been shut down");
    attempt_ = attempt;
  }
  const Deadline deadline = Clock::now() + timeout;
  const auto meet = [handles, first = members.front(), uuid = opts.uuid, rank, size, deadline, attempt] {
    const std::string name = c10::str("epoch/", first.token, "/", uuid);
    const auto store = sealedStore(connectTo(first, deadline, *attempt));
    ChangeStore part(name, store, deadline, attempt);
    checkThatHandlesAgree(part, handles, rank, leftUntil(deadline), *attempt);
    auto met = exchangeRecords(part, rank, size, leftUntil(deadline));
    beginTogether(part, rank, size, deadline, *attempt);
    return Meeting{.store = c10::make_intrusive<c10d::PrefixStore>(name, store), .members = std::move(met)};
  };
  auto meeting = meetInTime(meet, members.front(), timeout, deadline, *attempt);
  auto next = std::make_shared<GroupEpoch>(std::move(meeting.store), std::move(meeting.members),
                                           GroupIdentity{options_->group_name, rank, size}, options_,
                                           firstRanks(members), /*survivesDeaths=*/true);
  bool isUnwanted = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    isUnwanted = attempt->hasEndedByCall();
    // What is called from here on is about the new epoch, in whose store others may wait later.
    attempt_.reset();
    if (!isUnwanted) {
      std::swap(current_, next);
      isReconfigured_ = true;
      rank_ = rank;
      size_ = size;
    }
  }
  if (isUnwanted) {
    // The others have begun the new epoch: they are told.
    next->abort("was aborted");
    attempt->check();
  }
  if (next) leave(*next);
  return completedWork();
}

}  // namespace bagua

#endif
