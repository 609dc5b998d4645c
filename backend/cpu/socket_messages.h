// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "backend/cpu/message_transport.h"
#include "backend/net/transport.h"

namespace bagua {

// Messages over our own transport. One of another size than its place is an error that names both.
class SocketMessages final : public MessageTransport {
 public:
  explicit SocketMessages(std::shared_ptr<net::Group> group) : state_(std::make_shared<State>(std::move(group))) {}

  c10::intrusive_ptr<c10d::Work> send(const at::Tensor& bytes, int peer, int tag) override;
  c10::intrusive_ptr<c10d::Work> receive(const at::Tensor& bytes, int peer, int tag) override;
  c10::intrusive_ptr<c10d::Work> sendNumbered(const at::Tensor& bytes, int peer, uint64_t number) override;
  c10::intrusive_ptr<c10d::Work> receiveNumbered(const at::Tensor& bytes, int peer, uint64_t number) override;

 private:
  class Message;
  class Sent;
  class Received;
  c10::intrusive_ptr<c10d::Work> letGo(c10::intrusive_ptr<Message> message);
  // Shared with the messages, which a caller may keep for longer than the group.
  struct State {
    explicit State(std::shared_ptr<net::Group> owner) : group(std::move(owner)) {}
    const std::shared_ptr<net::Group> group;
    std::mutex mutex;
    // Messages so far, by rank and tag.
    std::map<std::pair<int, int>, uint32_t> sent;
    std::map<std::pair<int, int>, uint32_t> received;
  };

  const std::shared_ptr<State> state_;
  std::mutex mutex_;
  // A message goes on its way also where its sender has dropped the Work.
  std::deque<c10::intrusive_ptr<c10d::Work>> leaving_;
  // How many there are when all of them are looked at again.
  size_t nextSearch_ = 0;
};

}  // namespace bagua
