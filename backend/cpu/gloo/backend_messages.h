// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backend/cpu/message_transport.h"

namespace bagua {

// Messages over a c10d backend that posts them at once (Gloo does).
class BackendMessages final : public MessageTransport {
 public:
  explicit BackendMessages(c10::intrusive_ptr<c10d::Backend> backend) : backend_(std::move(backend)) {}

  c10::intrusive_ptr<c10d::Work> send(const at::Tensor& bytes, int peer, int tag) override;
  c10::intrusive_ptr<c10d::Work> receive(const at::Tensor& bytes, int peer, int tag) override;
  // Gloo ends its connection to a peer with the first receive that is given up, so that numbers are of no use.
  c10::intrusive_ptr<c10d::Work> sendNumbered(const at::Tensor& bytes, int peer, uint64_t number) override;
  c10::intrusive_ptr<c10d::Work> receiveNumbered(const at::Tensor& bytes, int peer, uint64_t number) override;

 private:
  const c10::intrusive_ptr<c10d::Backend> backend_;
};

}  // namespace bagua
