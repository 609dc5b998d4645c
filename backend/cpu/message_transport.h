// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>

#include "backend/torch_compat.h"

namespace bagua {

// Messages between two ranks, outside the order of programs. Both ends are posted at once, in any order; of messages
// with one tag between two ranks the first sent is the first received. Tensors are flat, of bytes. From any thread.
class MessageTransport {
 public:
  MessageTransport() = default;
  virtual ~MessageTransport() = default;
  MessageTransport(const MessageTransport&) = delete;
  MessageTransport& operator=(const MessageTransport&) = delete;

  // Works that throw from wait() what has gone wrong, that abort() ends, and that may be completed only while somebody
  // waits.
  virtual c10::intrusive_ptr<c10d::Work> send(const at::Tensor& bytes, int peer, int tag) = 0;
  // peer < 0: from any rank.
  virtual c10::intrusive_ptr<c10d::Work> receive(const at::Tensor& bytes, int peer, int tag) = 0;

  // The one message from one rank to another that bears this number, below 2^62: a receive that was given up takes no
  // other's place.
  virtual c10::intrusive_ptr<c10d::Work> sendNumbered(const at::Tensor& bytes, int peer, uint64_t number) = 0;
  virtual c10::intrusive_ptr<c10d::Work> receiveNumbered(const at::Tensor& bytes, int peer, uint64_t number) = 0;
};

}  // namespace bagua
