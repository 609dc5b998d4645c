// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "backend/cpu/tag_counts.h"
#include "backend/net/transport.h"
#include "backend/torch_compat.h"

namespace bagua {

// Messages between two ranks, outside the order of programs. Both ends are posted at once, in any order; of messages
// with one tag between two ranks the first sent is the first received, of receives from any rank by the first posted,
// and one of another size than its place is an error that names both. Tensors are flat, of bytes. From any thread.
class Messages {
 public:
  explicit Messages(std::shared_ptr<net::Group> group) : state_(std::make_shared<State>(std::move(group))) {}

  // Works that throw from wait() what has gone wrong, that abort() ends, and that may be completed only while somebody
  // waits.
  c10::intrusive_ptr<c10d::Work> send(const at::Tensor& bytes, int peer, int tag);
  // peer < 0: from any rank.
  c10::intrusive_ptr<c10d::Work> receive(const at::Tensor& bytes, int peer, int tag);

  // The one message from one rank to another that bears this number, below 2^62: a receive that was given up takes no
  // other's place.
  c10::intrusive_ptr<c10d::Work> sendNumbered(const at::Tensor& bytes, int peer, uint64_t number);
  c10::intrusive_ptr<c10d::Work> receiveNumbered(const at::Tensor& bytes, int peer, uint64_t number);

 private:
  class Message;
  class Sent;
  class Received;
  c10::intrusive_ptr<c10d::Work> letGo(c10::intrusive_ptr<Message> message);
  // Shared with the messages, which a caller may keep for longer than the group.
  struct State {
    explicit State(std::shared_ptr<net::Group> owner)
        : group(std::move(owner)), sent(group->size()), received(group->size()) {}
    // The end of every rank, and its leave, is to be noticed; not in large groups.
    void watchAll();
    const std::shared_ptr<net::Group> group;
    std::once_flag watched;
    std::mutex mutex;
    // Messages so far, by rank.
    std::vector<TagCounts> sent;
    std::vector<TagCounts> received;
    // The receives from any rank (Received) that nobody has begun to send to, by tag, in the order of their posting.
    std::map<int, std::deque<c10::weak_intrusive_ptr<c10d::Work>>> undirected;
  };

  const std::shared_ptr<State> state_;
  std::mutex mutex_;
  // A message goes on its way also where its sender has dropped the Work.
  std::deque<c10::intrusive_ptr<c10d::Work>> leaving_;
  // How many there are when all of them are looked at again.
  size_t nextSearch_ = 0;
};

}  // namespace bagua
