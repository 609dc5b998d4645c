// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <mutex>
#include <vector>

#include "backend/health/group_health.h"
#include "backend/operation.h"
#include "backend/torch_compat.h"

namespace bagua {

// Messages between two ranks over a c10d backend that posts them at once (Gloo does), so that they need no place in the
// order of programs: a rank may post its receive before or after its send.
class MessageChannel {
 public:
  MessageChannel(GroupIdentity group, c10::intrusive_ptr<c10d::Backend> backend,
                 std::shared_ptr<GroupHealth::Track> health);

  c10::intrusive_ptr<c10d::Work> send(const Operation& operation, at::Tensor tensor, int tag);
  // operation.peer < 0: from any rank.
  c10::intrusive_ptr<c10d::Work> receive(const Operation& operation, at::Tensor tensor, int tag);
  // Releases whoever waits for a message, now or later.
  void abort();

 private:
  c10::intrusive_ptr<c10d::Work> track(const Operation& operation, c10::intrusive_ptr<c10d::Work> transfer,
                                       at::Tensor tensor);
  void abortTransfer(c10d::Work& transfer) const;
  // What to throw for an error of the transport: see GroupHealth::Track::explain().
  [[nodiscard]] std::exception_ptr explain(const std::exception_ptr& error, const Operation& operation) const;

  const GroupIdentity group_;
  const c10::intrusive_ptr<c10d::Backend> backend_;
  const std::shared_ptr<GroupHealth::Track> health_;
  std::mutex mutex_;
  std::vector<c10::weak_intrusive_ptr<c10d::Work>> transfers_;
  bool isAborted_ = false;
};

}  // namespace bagua
