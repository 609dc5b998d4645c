// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "algorithms/hook/agreement.h"
#include "backend/executor.h"

namespace bagua {

// The ranks that a hook works with: who they are, what they have agreed on, and whether they are still the same. The
// members of a group may change between two steps (ProcessGroupBagua::reconfigure); then all that are in it now agree
// anew, at their next bucket, before any gradient travels. Used by the thread that trains, but for topology().
class HookMembers {
 public:
  explicit HookMembers(std::shared_ptr<ExecutorProvider> group)
      : group_(std::move(group)), epoch_(group_->epoch()), topology_(group_->topology()) {}

  [[nodiscard]] ExecutorProvider& group() const { return *group_; }
  [[nodiscard]] std::shared_ptr<const HostTopology> topology() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return topology_;
  }

  // Throws ValueError on all ranks unless all come with the same `own`, and with the same `arithmetic` where it is not
  // empty. What was agreed on first is remembered. Collective.
  void agree(Registration own, std::string arithmetic, at::Device device);
  // Returns whether the group has other members than those that have agreed.
  [[nodiscard]] bool haveChanged() const { return group_->epoch() != epoch_; }
  // Who of the members that there are now has come furthest, the lowest rank of several. A newcomer is behind.
  struct Furthest {
    int64_t step = 0;
    int rank = 0;
  };
  // These members agree on what this rank has agreed on before, or else on `text`; each tells its `step`. Changes
  // nothing: follow() does, once what follows from it is done. Collective.
  [[nodiscard]] Furthest meetAgain(int64_t step, const std::string& text, at::Device device);
  // From now on the hook works with those that have met last.
  void follow();
  // Nothing is left to agree on.
  void dissolve() { isDissolved_ = true; }

 private:
  struct Agreed {
    Registration own;
    std::string arithmetic;
    at::Device device;
  };

  const std::shared_ptr<ExecutorProvider> group_;
  uint64_t epoch_;
  // These two are of the members that have met last.
  uint64_t nextEpoch_ = epoch_;
  std::shared_ptr<const HostTopology> nextTopology_;
  std::optional<Agreed> agreed_;
  bool isDissolved_ = false;
  mutable std::mutex mutex_;
  std::shared_ptr<const HostTopology> topology_;
};

}  // namespace bagua
