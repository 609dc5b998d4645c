// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>
#include <vector>

#include "backend/cpu/messages.h"
#include "backend/health/group_health.h"
#include "backend/operation/operation.h"
#include "backend/torch_compat.h"

namespace bagua {

// Messages between two ranks as operations: with names, timeouts and errors that all ranks agree on. They need no place
// in the order of programs: a rank may post its receive before or after its send.
class Messenger {
 public:
  // Users' tags lie below.
  static constexpr int kTags = 1 << 30;

  Messenger(GroupIdentity group, std::unique_ptr<Messages> messages, std::shared_ptr<OperationLog> health);

  c10::intrusive_ptr<c10d::Work> send(const Operation& operation, at::Tensor tensor, int tag);
  // operation.peer < 0: from any rank.
  c10::intrusive_ptr<c10d::Work> receive(const Operation& operation, at::Tensor tensor, int tag);
  // For messages that are no operations.
  [[nodiscard]] Messages& messages() { return *messages_; }
  // Releases whoever waits for a message, now or later.
  void abort();

 private:
  c10::intrusive_ptr<c10d::Work> track(const Operation& operation, c10::intrusive_ptr<c10d::Work> transfer,
                                       at::Tensor tensor);
  // What to throw for an error of the transport: see OperationLog::explain().
  [[nodiscard]] std::exception_ptr explain(const std::exception_ptr& error, const Operation& operation) const;

  const GroupIdentity group_;
  const std::unique_ptr<Messages> messages_;
  const std::shared_ptr<OperationLog> health_;
  std::mutex mutex_;
  std::vector<c10::weak_intrusive_ptr<c10d::Work>> transfers_;
  // How many there are when they are looked at again.
  size_t nextSearch_ = 0;
  bool isAborted_ = false;
};

}  // namespace bagua
