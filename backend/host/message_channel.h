// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include "backend/operation.h"
#include "backend/torch_compat.h"

namespace bagua {

// Messages between two ranks over a c10d backend that posts them at once (Gloo does), so that they need no place in the
// order of programs: a rank may post its receive before or after its send.
class MessageChannel {
 public:
  MessageChannel(GroupIdentity group, c10::intrusive_ptr<c10d::Backend> backend);

  c10::intrusive_ptr<c10d::Work> send(const Operation& operation, at::Tensor tensor, int tag);
  // operation.peer < 0: from any rank.
  c10::intrusive_ptr<c10d::Work> receive(const Operation& operation, at::Tensor tensor, int tag);

 private:
  const GroupIdentity group_;
  const c10::intrusive_ptr<c10d::Backend> backend_;
};

}  // namespace bagua
