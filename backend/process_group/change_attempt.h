// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

#include "backend/rendezvous/member_handle.h"

namespace bagua {

// One call of reconfigure() while it waits for other members. abort() and shutdown() end it from another thread.
class ChangeAttempt {
 public:
  // `how` is a literal: "was aborted".
  void end(const char* how) { ended_ = how; }
  [[nodiscard]] bool hasEnded() const { return ended_ != nullptr; }
  // Throws DistBackendError once it has been ended.
  void check() const;

 private:
  std::atomic<const char*> ended_ = nullptr;
};

// A part of the store in which the members meet. Waiting in it ends with the attempt.
class ChangeStore final : public c10d::PrefixStore {
 public:
  ChangeStore(const std::string& name, const c10::intrusive_ptr<c10d::Store>& store,
              std::shared_ptr<const ChangeAttempt> attempt);

  using PrefixStore::wait;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;

 private:
  const std::shared_ptr<const ChangeAttempt> attempt_;
};

// The store that `member` serves. Throws DistBackendError at the deadline, or when the attempt ends.
c10::intrusive_ptr<c10d::Store> connectTo(const MemberHandle& member, std::chrono::steady_clock::time_point deadline,
                                          const ChangeAttempt& attempt);

// Not 0, which a store takes for no limit.
std::chrono::milliseconds leftUntil(std::chrono::steady_clock::time_point deadline);

}  // namespace bagua
