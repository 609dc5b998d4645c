// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "backend/net/event_loop.h"
#include "backend/net/incoming.h"
#include "backend/net/link.h"
#include "backend/net/stream.h"

namespace bagua::net {

class Group;

// How other processes reach one.
struct ProcessAddress {
  ProcessId process{};
  SocketAddress address;

  // "0123456789abcdef0123456789abcdef@10.0.0.1:4711", and back. parse() throws ValueError.
  [[nodiscard]] std::string toString() const;
  static ProcessAddress parse(const std::string& text);
};

// What a process has of the network between hosts: a port where it listens, a link to every process that it has spoken
// to, and the groups whose messages these carry. Any thread may call.
class Transport final : public std::enable_shared_from_this<Transport> {
 public:
  // Listens at `address`, and answers from the first join() on. With `encryption`, only processes that it accepts are
  // spoken with. Throws DistNetworkError.
  static std::shared_ptr<Transport> listenAt(const std::string& address, int mostConnections,
                                             std::shared_ptr<const Encryption> encryption = nullptr);
  ~Transport();
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  [[nodiscard]] const ProcessAddress& address() const { return address_; }
  // `id` is the same on all ranks, and nobody else's. `ranks` are all ranks' addresses, `neighbours` those of this
  // host.
  std::shared_ptr<Group> join(uint64_t id, int rank, const std::vector<ProcessAddress>& ranks,
                              const std::vector<int>& neighbours = {});
  // As if the network had reset every connection.
  void loseLinksForTest();

 private:
  friend class Group;
  class Listener;
  class Guest;

  Transport(const std::string& address, int mostConnections, std::shared_ptr<const Encryption> encryption);
  // The link over which this process speaks to a peer; made where there is none, or only a lost one.
  std::shared_ptr<Link> linkTo(const ProcessAddress& peer);
  std::shared_ptr<Link> makeLink(const ProcessAddress& peer);
  void welcome(const Hello& hello, Stream stream);
  // On the guests' thread.
  void noteRefusal(const Stream& stream);
  // Null where there is none to go to: the group was left.
  std::shared_ptr<Inbox> inboxOf(uint64_t group);
  void leave(uint64_t group);

  const int mostConnections_;
  const std::shared_ptr<const Encryption> encryption_;
  FileDescriptor listening_;
  ProcessAddress address_;
  std::mutex mutex_;
  // What has come for a group that this process is about to join waits here.
  std::map<uint64_t, std::shared_ptr<Inbox>> inboxes_;
  std::map<uint64_t, std::weak_ptr<Group>> groups_;
  // By the peer's process; the last one made.
  std::map<ProcessId, std::shared_ptr<Link>> links_;
  // Groups that were left not long ago: what still comes for them is thrown away.
  std::deque<uint64_t> left_;
  bool isAnswering_ = false;
  uint64_t refused_ = 0;
  std::optional<std::chrono::steady_clock::time_point> refusalTold_;
  const std::shared_ptr<EventLoop> loop_ = std::make_shared<EventLoop>();
  // Of whoever connects, until it is known: with encryption a thread of its own, so that handshakes, and those who
  // besiege the listener, keep no message waiting.
  const std::shared_ptr<EventLoop> guestLoop_;
};

// One group's part of the transport: messages between its ranks.
class Group {
 public:
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
  // The first `ready` bytes may leave at once. `signal` is told when all have gone, or where `tellsProgress` of every
  // frame.
  struct Message {
    const uint8_t* data = nullptr;
    uint64_t size = 0;
    uint64_t ready = 0;
    std::vector<uint8_t> context = {};
    bool tellsProgress = false;
    std::shared_ptr<Signal> signal = nullptr;
    // Of what the group may send to `peer` unasked, for this message: what is left is for others.
    uint64_t mostUnasked = kUnaskedBytes;
  };
  std::unique_ptr<Sending> send(int peer, uint64_t stream, uint32_t index, Message message);
  // Has the end of `peer` noticed, though nothing is sent to it.
  void watch(int peer) { linkTo(peer)->connect(); }
  // See Link.
  [[nodiscard]] Line lineTo(int peer) { return linkTo(peer)->line(); }
  // See Inbox.
  void retire(uint64_t stream) { inbox_->retire(stream); }
  std::optional<MessageKey> firstBegun(const std::vector<MessageKey>& keys, const std::shared_ptr<Signal>& signal) {
    return inbox_->firstBegun(keys, signal);
  }
  // Why nothing more comes from `peer`; empty: it may.
  [[nodiscard]] std::string errorOf(int peer) { return inbox_->errorOf(static_cast<uint32_t>(peer)); }

  // Tells all peers that this rank has begun to speak with that no more will come. Nothing is sent afterwards.
  void leave();
  // The first peer whose connection was lost before it left, in words.
  std::optional<std::string> findLost();
  // The link to `process` is lost.
  void onLost(const ProcessId& process, const std::string& error);

 private:
  std::shared_ptr<Link> linkTo(int peer);

  const std::shared_ptr<Transport> transport_;
  const uint64_t id_;
  const int rank_;
  const std::vector<ProcessAddress> ranks_;
  const std::vector<int> neighbours_;
  const std::shared_ptr<Inbox> inbox_;
  std::mutex mutex_;
  // The links that this group has begun with: it does not go on after a loss.
  std::vector<std::shared_ptr<Link>> links_;
  std::optional<std::string> lost_;
  bool hasLeft_ = false;
};

// A message that will be received. Given up when this goes.
class Group::Receiving {
 public:
  Receiving(std::shared_ptr<Inbox> inbox, const MessageKey& key, std::shared_ptr<Incoming> message,
            std::shared_ptr<Link> link, uint64_t group, const Place& place);
  ~Receiving() {
    message_->cancel();
    // What still comes of one that was given up has to find it, to be thrown away.
    if (message_->state().isComplete()) inbox_->forget(key_);
  }
  Receiving(const Receiving&) = delete;
  Receiving& operator=(const Receiving&) = delete;
  [[nodiscard]] Incoming::State state() const { return message_->state(); }
  [[nodiscard]] std::vector<uint8_t> context() const { return message_->context(); }
  // See Incoming::use().
  void use(uint64_t bytes);

 private:
  const std::shared_ptr<Inbox> inbox_;
  const MessageKey key_;
  const std::shared_ptr<Incoming> message_;
  // Null where the message needs no more than the sender may send anyway.
  const std::shared_ptr<Link> link_;
  const uint64_t group_;
  const uint64_t size_;
  const uint64_t room_;
  // Bytes for which the sender knows a place.
  uint64_t told_ = kEagerBytes;
};

// A message that is sent. Given up when this goes.
class Group::Sending {
 public:
  Sending(std::shared_ptr<Link> link, std::shared_ptr<Outgoing> message)
      : link_(std::move(link)), message_(std::move(message)) {}
  ~Sending() {
    if (!link_->stateOf(*message_).isComplete) link_->cancel(message_);
  }
  Sending(const Sending&) = delete;
  Sending& operator=(const Sending&) = delete;
  void makeReady(uint64_t bytes) { link_->makeReady(message_, bytes); }
  [[nodiscard]] Link::State state() const { return link_->stateOf(*message_); }

 private:
  const std::shared_ptr<Link> link_;
  const std::shared_ptr<Outgoing> message_;
};

}  // namespace bagua::net
