// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

#include "backend/rendezvous/member_handle.h"
#include "backend/rendezvous/rank_record.h"

namespace bagua {

// One call of reconfigure() while it waits for other members. abort() and shutdown() end it from another thread.
class ChangeAttempt {
 public:
  // This member waits no longer. `how` is a literal: "did not hear in time". The first one counts.
  void end(const char* how);
  // The same, by a call about the group: "was aborted".
  void endByCall(const char* how);
  [[nodiscard]] bool hasEnded() const { return ended_ != nullptr; }
  // Whether there was such a call, also where the members had met already.
  [[nodiscard]] bool hasEndedByCall() const { return isByCall_; }
  // Throws DistBackendError once it has been ended.
  void check() const;

 private:
  std::atomic<const char*> ended_ = nullptr;
  std::atomic<bool> isByCall_ = false;
};

// A part of the store in which the members meet. Waiting in it ends with the attempt. While it exists, its store may
// take until the deadline to answer, and at least as long as its own timeout, which is for one try to connect.
class ChangeStore final : public c10d::PrefixStore {
 public:
  ChangeStore(const std::string& name, const c10::intrusive_ptr<c10d::Store>& store,
              std::chrono::steady_clock::time_point deadline, std::shared_ptr<const ChangeAttempt> attempt);

  using PrefixStore::wait;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;

 private:
  const c10d::StoreTimeoutGuard patience_;
  const std::shared_ptr<const ChangeAttempt> attempt_;
};

// The store that `member` serves. Throws DistBackendError at the deadline, or when the attempt ends.
c10::intrusive_ptr<c10d::Store> connectTo(const MemberHandle& member, std::chrono::steady_clock::time_point deadline,
                                          const ChangeAttempt& attempt);

// A Meeting holds what the members of a new epoch have found when they met.
struct Meeting {
  // They met here.
  c10::intrusive_ptr<c10d::Store> store;
  GroupMembers members;
};

// Returns what `meet` returns, and throws what it throws, in time: a store whose process is stopped, or whose host is
// cut off, neither answers nor breaks, and nothing ends a call of it. So `meet` runs on a thread of its own, which is
// given up with a DistBackendError a moment after the deadline or the end of the attempt. The thread ends when its
// connection does. It may do so after the group, of which `meet` must hold nothing but the attempt.
Meeting meetInTime(std::function<Meeting()> meet, const MemberHandle& first, std::chrono::milliseconds timeout,
                   std::chrono::steady_clock::time_point deadline, ChangeAttempt& attempt);

}  // namespace bagua
