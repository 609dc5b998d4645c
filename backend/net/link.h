// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backend/net/event_loop.h"
#include "backend/net/frame_reader.h"
#include "backend/net/incoming.h"
#include "backend/net/payload_memory.h"
#include "backend/net/stream.h"

namespace bagua::net {

// A message on its way out, in its link's hands. Read through Link::stateOf().
struct Outgoing {
  uint64_t group = 0;
  MessageKey key;
  const uint8_t* data = nullptr;
  uint64_t total = 0;
  std::vector<uint8_t> context;
  std::shared_ptr<Signal> signal;

  // Bytes from the beginning that may leave; that the receiver takes; that connections have been given; that the kernel
  // has. The last is a count: frames overtake each other.
  uint64_t ready = 0;
  uint64_t allowed = kEagerBytes;
  // Of these, for how many the receiver has told a place. The others need room in the group's account.
  uint64_t placed = 0;
  // How full that may be for this message.
  uint64_t mostUnasked = kUnaskedBytes;
  uint64_t taken = 0;
  uint64_t sent = 0;
  bool hasBegun = false;
  bool isCancelled = false;
  // Whether the receiver has heard that the message waits.
  bool hasToldOfWaiting = false;
  // Of the messages of the link, in the order of submission.
  uint64_t number = 0;
  // Whether `signal` is told of every frame that has gone, not only of the last.
  bool tellsProgress = false;

  [[nodiscard]] uint64_t sendable() const { return std::min(ready, allowed); }
  // An empty message is a frame too.
  [[nodiscard]] bool hasFrame() const { return taken < sendable() || (!hasBegun && total == 0); }
  [[nodiscard]] bool isUnasked() const { return total > 0 && taken >= placed; }
  // Of the next frame.
  [[nodiscard]] uint32_t payloadBytes() const {
    const uint64_t end = isUnasked() ? sendable() : std::min(sendable(), placed);
    return static_cast<uint32_t>(std::min<uint64_t>(end - taken, kMostPayload));
  }
  [[nodiscard]] bool isComplete() const { return hasBegun && sent == total; }
};

// All connections between this process and another one. Messages are cut into frames, which go out on whatever
// connection takes one next, the oldest message first. Any thread may call; who sends writes to the sockets himself as
// long as they take it, and the event loop goes on from there.
//
// Connections are opened by who has something to send. With a distance there are several: one alone is limited by the
// kernel's buffers, and recovers slowly from a loss.
class Link final : public Answers, public std::enable_shared_from_this<Link> {
 public:
  struct Peer {
    ProcessId process{};
    SocketAddress address;
  };
  // Frames that come for a group: see FrameReader.
  struct Receiver {
    // `sender` is the link.
    std::function<std::shared_ptr<Incoming>(const Frame& frame, const std::vector<uint8_t>& context,
                                            const std::shared_ptr<Answers>& sender)>
        begin;
    FrameReader::End end;
    // Of a group: its sender has left, after so many data frames.
    std::function<void(const Frame& frame)> leave;
    // The link is lost, with what was under way on it.
    std::function<void(const std::string& error)> lost;
  };
  struct State {
    bool isComplete = false;
    // The first frame, with the context, has gone.
    bool hasContextGone = false;
    // Bytes from the beginning that are no longer read.
    uint64_t gone = 0;
    // Not empty: it will never be.
    std::string error;
  };

  // How this process opens connections.
  struct Opening {
    int mostConnections = 1;
    // Null: none.
    std::shared_ptr<const Encryption> encryption;
  };

  Link(std::shared_ptr<EventLoop> loop, const ProcessId& self, Peer peer, uint64_t id, Opening opening,
       Receiver receiver);
  ~Link() override;

  // The first `ready` bytes may leave at once. `outgoing.data` stays until it is complete or cancelled.
  void send(const std::shared_ptr<Outgoing>& outgoing);
  void makeReady(const std::shared_ptr<Outgoing>& outgoing, uint64_t ready);
  State stateOf(const Outgoing& outgoing);
  // From here on its data are not read. Its frames that have begun are completed with what is in them.
  void cancel(const std::shared_ptr<Outgoing>& outgoing);
  // Opens a connection where there is none, though there is nothing to send: whoever waits for the peer is to notice
  // its end.
  void connect();
  // The peer is on this host: larger payloads go through memory that both processes see, once there is some.
  void shareMemory();
  void tellPlace(uint64_t group, const MessageKey& key, uint64_t bytes) override;
  void tellCredit(uint64_t group, uint64_t bytes) override;
  // Gives up what is still to be sent for a group, and tells the peer that no more will come from rank `source`.
  void leave(uint64_t group, uint32_t source);

  // A connection that the peer has opened, for its link `peerLink`. False where that is another than so far: the peer
  // has lost the one that this is the end of.
  bool adopt(Stream& stream, uint64_t peerLink);
  // The peer has opened the link; this is where we can reach it.
  void learnAddress(const SocketAddress& address);
  void close(const std::string& reason);
  [[nodiscard]] bool isLost();
  // Of all connections together; zeros where nothing is known yet.
  [[nodiscard]] Line line();
  // For statistics and tests.
  [[nodiscard]] int connections();

 private:
  class Connection;
  using Lock = std::unique_lock<std::mutex>;

  // Under the mutex.
  void openWhereNeeded();
  [[nodiscard]] int neededConnections() const;
  [[nodiscard]] Line lineOfAll() const;
  void open();
  bool giveFrame(Connection& connection);
  // Whether its next frame has a place, or room in the account.
  bool mayLeave(const Outgoing& outgoing);
  // Out of the queue.
  void letWait(const std::deque<std::shared_ptr<Outgoing>>::iterator& message);
  void giveFrameOf(const std::shared_ptr<Outgoing>& outgoing, Frame::Kind kind, uint32_t cell, Connection& connection);
  bool goesThroughMemory(const Outgoing& outgoing);
  void afterWriting(Connection& connection, std::vector<std::shared_ptr<Signal>>& signals);
  // Writes until nothing is left or nobody takes it.
  void pump(Lock& lock);

  // From connections, on the loop's thread.
  void onConnecting(const std::shared_ptr<Connection>& connection);
  void onWritable(Connection& connection);
  // Another in the place of one whose handshake came to no end. Whether that is worth a try.
  bool openAnother(const std::shared_ptr<Connection>& connection);
  void onRead(const std::shared_ptr<Connection>& connection, FrameReader::Result result);
  void onControl(const Frame& frame, const std::vector<uint8_t>& context);
  void onPlace(const Frame& frame);
  void onCredit(const Frame& frame);
  bool readCell(uint32_t cell, const std::function<void(const uint8_t* payload)>& read);

  const std::shared_ptr<EventLoop> loop_;
  const ProcessId self_;
  const uint64_t id_;
  const Opening opening_;
  const Receiver receiver_;

  std::mutex mutex_;
  Peer peer_;
  // A thread has come back from writing.
  std::condition_variable written_;
  std::vector<std::shared_ptr<Connection>> connections_;
  // In the order of submission, but for those that have waited, which go first.
  std::deque<std::shared_ptr<Outgoing>> queue_;
  // Without a message, as bytes. They go first.
  std::deque<std::vector<uint8_t>> controls_;
  // Places that the peer has told of, for messages that this rank has not come to yet.
  std::map<std::pair<uint64_t, MessageKey>, uint64_t> placesAhead_;
  // What has begun to leave of a group's messages.
  struct Account {
    uint64_t frames = 0;
    // Charged, and no credit came for it yet.
    uint64_t unasked = 0;
    // Messages that found no room, by number.
    std::map<uint64_t, std::shared_ptr<Outgoing>> waiting = {};
  };
  std::map<uint64_t, Account> accounts_;
  // Messages so far.
  uint64_t submitted_ = 0;
  std::optional<uint64_t> peerLink_;
  // Towards a peer on this host: whether there is to be memory for payloads; that of this process, and the peer's.
  bool sharesMemory_ = false;
  std::shared_ptr<PayloadMemory> ownMemory_;
  std::shared_ptr<PayloadMemory> peersMemory_;
  // Connections lost before they were one, since one succeeded.
  int lostInHandshake_ = 0;
  std::string error_;
};

}  // namespace bagua::net
