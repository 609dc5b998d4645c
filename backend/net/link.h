// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "backend/net/connection.h"
#include "backend/net/event_loop.h"
#include "backend/net/inbox.h"
#include "backend/net/outbox.h"
#include "backend/net/payload_memory.h"
#include "backend/net/stream.h"

namespace bagua::net {

// The way between this process and another one: an Outbox, and the connections that take its frames, each whenever it
// can. Any thread may call; a sender writes to the sockets itself as long as they take it, and the event loop goes on
// from there.
//
// The side that has something to send opens connections. Over a distance there are several: one alone is limited by the
// kernel's buffers, and recovers slowly from a loss.
class Link final : public FlowControl, public Connection::Owner, public std::enable_shared_from_this<Link> {
 public:
  struct Peer {
    ProcessId process{};
    SocketAddress address;
  };
  // A link belongs to this. It is called on the loop's thread; onLost() on any.
  class Owner {
   public:
    Owner() = default;
    virtual ~Owner() = default;
    Owner(const Owner&) = delete;
    Owner& operator=(const Owner&) = delete;

    // See FrameSink. `sender` is the link.
    virtual Delivery begin(const Frame& frame, const std::vector<uint8_t>& context,
                           const std::shared_ptr<FlowControl>& sender) = 0;
    // A rank has left a group, after so many data frames.
    virtual void onLeave(const Frame& frame) = 0;
    // The link is lost, with what was under way on it.
    virtual void onLost(const Link& link, const std::string& error) = 0;
  };
  struct State {
    bool isComplete = false;
    // The first frame, with the context, has gone.
    bool hasContextGone = false;
    // The bytes from the beginning that are no longer read.
    uint64_t gone = 0;
    // Not empty: the message will never be complete.
    std::string error;
  };

  // This process opens connections so, and gives one up when its patience is over.
  struct Opening {
    int mostConnections = 1;
    // Null: connections are not encrypted.
    std::shared_ptr<const Encryption> encryption = nullptr;
    std::chrono::milliseconds patience = kPatienceWithSilence;
  };

  Link(std::shared_ptr<EventLoop> loop, const ProcessId& self, Peer peer, uint64_t id, Opening opening,
       std::weak_ptr<Owner> owner);
  ~Link() override;

  // The first `ready` bytes may leave at once. `message->data` stays until it is complete or cancelled.
  void send(const std::shared_ptr<Outgoing>& message);
  void makeReady(const std::shared_ptr<Outgoing>& message, uint64_t ready);
  State stateOf(const Outgoing& message);
  // The message's data are not read from here on. Its frames that have begun are completed with what is in them.
  void cancel(const std::shared_ptr<Outgoing>& message);
  // Opens a connection where there is none, though there is nothing to send: the end of the peer is to be noticed.
  void connect();
  // The peer is on this host: larger payloads go through memory that both processes see, once there is some.
  void shareMemory();
  void grantPlace(uint64_t group, const MessageKey& key, uint64_t bytes) override;
  void grantCredit(uint64_t group, uint64_t bytes) override;
  // Gives up what is still to be sent for a group, and tells the peer that no more will come from rank `source`.
  void leave(uint64_t group, uint32_t source);

  // Takes a connection that the peer has opened, for its link `peerLink`. Returns false where that is another than so
  // far: the peer has lost the one that this is the end of.
  bool adopt(Stream& stream, uint64_t peerLink);
  // The peer has opened the link; this is where we can reach it.
  void learnAddress(const SocketAddress& address);
  void close(const std::string& reason);
  [[nodiscard]] bool isLost() const { return isLost_; }
  [[nodiscard]] const ProcessId& peer() const { return process_; }
  // Adds up all connections; zeros where nothing is known yet.
  [[nodiscard]] Line line();

 private:
  using Lock = std::unique_lock<std::mutex>;

  // --- Connection::Owner
  Delivery begin(const Frame& frame, const std::vector<uint8_t>& context) override;
  void control(const Frame& frame, const std::vector<uint8_t>& context) override;
  bool readCell(uint32_t cell, const std::function<void(const uint8_t* payload)>& read) override;
  void onConnecting(const std::shared_ptr<Connection>& connection) override;
  void onWritable(Connection& connection) override;
  void onRead(const std::shared_ptr<Connection>& connection, FrameReader::Result result) override;

  // These are called under the mutex.
  void openWhereNeeded();
  [[nodiscard]] int neededConnections() const;
  [[nodiscard]] Line lineOfAll() const;
  void open();
  void add(const std::shared_ptr<Connection>& connection, bool wantsWritable);
  bool giveFrame(Connection& connection);
  std::optional<uint32_t> chooseCell(uint32_t payloadBytes);
  // Sends a frame without a message, unless the link is lost.
  void sendControl(const Frame& frame);
  // Writes until nothing is left or no connection takes it. Releases the lock.
  void pump(Lock& lock);

  // Looks whether the peer's kernel still answers, and again after a while. On the loop's thread.
  void lookForSilence();
  void lookLater();

  const std::shared_ptr<EventLoop> loop_;
  const ProcessId self_;
  const ProcessId process_;
  const uint64_t id_;
  const Opening opening_;
  const std::weak_ptr<Owner> owner_;

  std::mutex mutex_;
  SocketAddress address_;
  // A thread has come back from writing.
  std::condition_variable written_;
  std::vector<std::shared_ptr<Connection>> connections_;
  Outbox outbox_;
  // The peer's number of this link, once a connection of the peer has told it.
  std::optional<uint64_t> peerLink_;
  // A peer on this host is sent payloads through memory: that of this process; the other is the peer's.
  bool sharesMemory_ = false;
  std::shared_ptr<PayloadMemory> ownMemory_;
  std::shared_ptr<PayloadMemory> peersMemory_;
  bool isWatched_ = false;
  std::string error_;
  // error_ is set; this is for those who do not hold the mutex.
  std::atomic<bool> isLost_ = false;
};

}  // namespace bagua::net
