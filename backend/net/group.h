// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "backend/net/inbox.h"
#include "backend/net/link.h"
#include "backend/net/process_address.h"

namespace bagua::net {

class Transport;

// One group's part of the transport: messages between its ranks. Any thread may call.
class Group {
 public:
  // `inbox` is the one that the transport delivers the group's frames to.
  Group(std::shared_ptr<Transport> transport, uint64_t id, int rank, std::vector<ProcessAddress> ranks,
        std::vector<int> neighbours, std::shared_ptr<Inbox> inbox);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return static_cast<int>(ranks_.size()); }

  class Receiving;
  class Sending;
  std::unique_ptr<Receiving> receive(int peer, uint64_t stream, uint32_t index, Place place);
  std::unique_ptr<Sending> send(int peer, uint64_t stream, uint32_t index, Message message);
  // The end of `peer` is to be noticed, though nothing is sent to it.
  void watch(int peer) { linkTo(peer)->connect(); }
  // Its leave of the group is to be noticed, too.
  void watchLeave(int peer);
  // See Link.
  [[nodiscard]] Line lineTo(int peer) { return linkTo(peer)->line(); }
  // See Inbox.
  void retire(uint64_t stream) { inbox_->retire(stream); }
  std::optional<MessageKey> firstBegun(const std::vector<MessageKey>& keys, const std::shared_ptr<Signal>& signal) {
    return inbox_->firstBegun(keys, signal);
  }
  // Returns why nothing more comes from `peer`; empty: it may.
  [[nodiscard]] std::string errorOf(int peer) { return inbox_->errorOf(static_cast<uint32_t>(peer)); }
  void watchErrorOf(int peer, const std::shared_ptr<Signal>& signal) {
    inbox_->watchErrorOf(static_cast<uint32_t>(peer), signal);
  }

  // Returns whether the process of `peer` has ended: errors that name it are a cause, and no symptom of another one.
  [[nodiscard]] bool hasDied(int peer);

  // Tells all peers that this rank has spoken with, and those that have spoken or have asked for it, that no more will
  // come. Nothing is sent afterwards.
  void leave();
  // Returns the first peer whose connection was lost before it left, in words.
  std::optional<std::string> findLost();
  // `peer` asks to be told when this rank leaves.
  void onAskForLeave(uint32_t peer);
  // `process` takes nothing for this group, and sends nothing.
  void onAbsent(const ProcessId& process);
  // Returns what waiters get to hear of a rank that has left.
  static std::string leaveOf(uint32_t rank);
  // The transport has lost `link`, which led to `process`. A group that has not used it goes on over another one.
  void onLost(const Link& link, const ProcessId& process, const std::string& error);

 private:
  std::shared_ptr<Link> linkTo(int peer);

  const std::shared_ptr<Transport> transport_;
  const uint64_t id_;
  const int rank_;
  const std::vector<ProcessAddress> ranks_;
  const std::vector<int> neighbours_;
  const std::shared_ptr<Inbox> inbox_;
  std::mutex mutex_;
  // The links that this group has begun with: it does not go on with a peer after a loss.
  std::vector<std::shared_ptr<Link>> links_;
  // The peers that will tell of their leave.
  std::set<int> asked_;
  std::optional<std::string> lost_;
  std::set<int> died_;
  bool hasLeft_ = false;
};

// A message that will be received; its end gives it up.
class Group::Receiving {
 public:
  Receiving(std::shared_ptr<Inbox> inbox, const MessageKey& key, std::shared_ptr<Incoming> message,
            std::shared_ptr<Link> link, uint64_t group, const Place& place);
  ~Receiving() {
    message_->cancel();
    // Frames that still come of a message that was given up have to find it, to be thrown away.
    if (message_->state().isComplete()) inbox_->forget(key_);
  }
  Receiving(const Receiving&) = delete;
  Receiving& operator=(const Receiving&) = delete;

  [[nodiscard]] Incoming::State state() const { return message_->state(); }
  [[nodiscard]] std::vector<uint8_t> context() const { return message_->context(); }
  // The receiver needs the first `bytes` no longer: a place that is smaller than the message has room for as many more.
  void use(uint64_t bytes);

 private:
  const std::shared_ptr<Inbox> inbox_;
  const MessageKey key_;
  const std::shared_ptr<Incoming> message_;
  // Null where the sender need not hear of the place.
  const std::shared_ptr<Link> link_;
  const uint64_t group_;
  const uint64_t size_;
  const uint64_t room_;
  uint64_t granted_ = kEagerBytes;
};

// A message that is sent; its end gives it up.
class Group::Sending {
 public:
  Sending(std::shared_ptr<Link> link, std::shared_ptr<Outgoing> message)
      : link_(std::move(link)), message_(std::move(message)) {}
  ~Sending() { link_->giveUp(message_); }
  Sending(const Sending&) = delete;
  Sending& operator=(const Sending&) = delete;
  void makeReady(uint64_t bytes) { link_->makeReady(message_, bytes); }
  [[nodiscard]] Link::State state() const { return link_->stateOf(*message_); }
  // The caller may change the first `bytes`, which have gone: see Link.
  void release(uint64_t bytes) { link_->release(message_, bytes); }

 private:
  const std::shared_ptr<Link> link_;
  const std::shared_ptr<Outgoing> message_;
};

}  // namespace bagua::net
