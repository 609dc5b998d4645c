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
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "backend/net/connection.h"
#include "backend/net/event_loop.h"
#include "backend/net/inbox.h"
#include "backend/net/loss_watch.h"
#include "backend/net/outbox.h"
#include "backend/net/payload_memory.h"
#include "backend/net/probe.h"
#include "backend/net/stream.h"

namespace bagua::net {

class Transport;

// Connections of this process that have broken, and whose links went on over others. Any thread may count.
std::atomic<uint64_t>& reconnections();

// The way between this process and another one: an Outbox, and the connections that take its frames, each whenever it
// can. Any thread may call; a sender writes to the sockets itself as long as they take it, and the event loop goes on
// from there. Connections come and go, and what they were given arrives nevertheless: see Hello.
//
// The side that has something to send opens connections. Over a distance there are several: one alone is limited by the
// kernel's buffers, and recovers slowly from a loss.
class Link final : public FlowControl, public std::enable_shared_from_this<Link> {
  using Lock = std::unique_lock<std::mutex>;

 public:
  struct Peer {
    ProcessId process{};
    SocketAddress address;
  };
  struct State {
    bool isComplete = false;
    // No bytes wait for anything but the kernel: all are in frames.
    bool isCut = false;
    // The first frame, with the context, has gone.
    bool hasContextGone = false;
    // The bytes from the beginning that have gone; and of these, those that will not be read again: see release().
    uint64_t gone = 0;
    uint64_t released = 0;
    // Not empty: the message will never be complete.
    std::string error;
  };

  // This process opens connections so, and gives the link up when it has been without a sign of the peer's host for so
  // long.
  struct Opening {
    int mostConnections = 1;
    // Null: connections are not encrypted.
    std::shared_ptr<const Encryption> encryption = nullptr;
    std::chrono::milliseconds patience = kPatienceWithSilence;
  };

  Link(std::shared_ptr<EventLoop> loop, const ProcessId& self, Peer peer, uint64_t id, Opening opening,
       std::weak_ptr<Transport> transport);
  ~Link() override;

  // The first `ready` bytes may leave at once. `message->data` stays until it is released.
  void send(const std::shared_ptr<Outgoing>& message);
  void makeReady(const std::shared_ptr<Outgoing>& message, uint64_t ready);
  State stateOf(const Outgoing& message);
  // The first `end` bytes of the message's data, which have gone, are not read from here on: what the peer may still
  // need of them is copied. Needless where they change only by what the peer makes of them and sends back: then it has
  // them.
  void release(const std::shared_ptr<Outgoing>& message, uint64_t end);
  // Nor is anything of it, complete or not. Frames that have begun are completed with what is in them.
  void giveUp(const std::shared_ptr<Outgoing>& message);
  // Opens a connection where there is none, though there is nothing to send: the end of the peer is to be noticed.
  void connect();
  // The peer is on this host: larger payloads go through memory that both processes see, once there is some.
  void shareMemory();
  void grantPlace(uint64_t group, const MessageKey& key, uint64_t bytes) override;
  void grantCredit(uint64_t group, uint64_t bytes) override;
  // Gives up what is still to be sent for a group, and tells the peer that no more will come from rank `source`.
  void leave(uint64_t group, uint32_t source);
  // Tells the peer that this process has no part in a group, for which it has sent nothing over this link.
  void tellAbsence(uint64_t group) { sendControl({.kind = Frame::Kind::kAbsent, .group = group}); }
  // Asks the peer to tell rank `source` when it leaves a group.
  void askForLeave(uint64_t group, uint32_t source) {
    sendControl(
        {.kind = Frame::Kind::kAskForLeave, .group = group, .key = {.stream = 0, .source = source, .index = 0}});
  }

  // Takes a connection that the peer has opened. Returns false where that belongs to another link than so far: the peer
  // has lost the one that this is the end of.
  bool adopt(Stream& stream, const Hello& hello);
  // A group has told where the peer listens.
  void learnAddress(const SocketAddress& address);
  void close(std::string reason) {
    Lock lock(mutex_);
    close(lock, std::move(reason));
  }
  [[nodiscard]] bool isLost() const { return isLost_; }
  // Nobody listens where the peer has, or another process does: nothing more will come of it.
  [[nodiscard]] bool hasPeerDied() const { return hasPeerDied_; }
  [[nodiscard]] const ProcessId& peer() const { return process_; }
  [[nodiscard]] uint64_t id() const { return id_; }
  // Asks the peer to tell at once what has come.
  void askPeer();
  // Returns of how many frames the peer has not told yet that they have come, and of how many connections.
  [[nodiscard]] uint64_t awaited();
  // Returns whether the last connection has ended, none has taken its place, and a message was on its way that the peer
  // may need.
  [[nodiscard]] bool isBroken();
  // Adds up all connections; zeros where nothing is known yet.
  [[nodiscard]] Line line();

  // --- Its connections call these on the loop's thread. See FrameSink for the first four.
  Delivery begin(const Frame& frame, const std::vector<uint8_t>& context);
  bool control(Connection& connection, const Frame& frame, const std::vector<uint8_t>& context);
  bool acknowledge(Connection& connection, uint64_t received);
  bool readCell(uint32_t cell, const std::function<void(const uint8_t* payload)>& read);
  // The socket has an event before the connection is one: the answer of the other side, or why there is none.
  void onConnecting(const std::shared_ptr<Connection>& connection);
  void onWritable(Connection& connection);
  void onRead(const std::shared_ptr<Connection>& connection, FrameReader::Result result);

 private:
  // A link looks so many times for a sign of the peer before its patience is over. It counts looks and not seconds:
  // while this process or its machine was stopped, nobody could see a sign.
  static constexpr int kLooks = 8;

  // --- link.cpp. These are called under the mutex.
  bool giveFrame(Connection& connection);
  std::optional<uint32_t> chooseCell(uint32_t payloadBytes);
  // Writes until nothing is left or no connection takes it. Releases the lock.
  void pump(Lock& lock);
  // Ends the link, and releases the lock to tell of that.
  void close(Lock& lock, std::string reason);
  // Sends a frame without a message, unless the link is lost. Not under the mutex.
  void sendControl(const Frame& frame);
  // The peer takes nothing more for a group. Not under the mutex.
  void noteLeft(uint64_t group);

  // --- link_connections.cpp. These are called under the mutex.
  void openWhereNeeded();
  [[nodiscard]] int neededConnections();
  // The payload of the next frame that the connection takes.
  [[nodiscard]] uint32_t payloadFor(Connection& connection) const;
  [[nodiscard]] Line lineOfAll() const;
  void open();
  // Opens a connection where none is on its way: now, or after a while if it is still needed.
  void dial();
  void dialLater(std::chrono::milliseconds delay);
  // Before the next try, after all that have failed.
  [[nodiscard]] std::chrono::milliseconds pause() const;
  [[nodiscard]] bool isDialing() const;
  [[nodiscard]] bool hasWelcome() const;
  // Limits for how long a connection that is opened is waited for: see Hello.
  void limitWait(const std::shared_ptr<Connection>& connection);
  void noteOverdue(Connection& connection);
  void add(const std::shared_ptr<Connection>& connection, bool wantsWritable);
  // Whoever is refused at the peer's address knows that nobody listens there any more.
  [[nodiscard]] bool isReachable() const;
  // The peer has come, and its address leads to nobody, or to others: it can come again.
  [[nodiscard]] bool comesByItself() const { return !peersSource_.empty() && !isReachable(); }
  // Finds out after this time, or twice it, whether the peer can be reached, if a connection works then.
  void probeLater(std::chrono::milliseconds least);

  // --- link_loss.cpp. These are called under the mutex.
  // A connection is there, or again.
  void beginWith(Connection& connection);
  // Ends the connections that have been silent for long, as the line works.
  void endSilent();
  // Says the last word about the connections that have ended, over those that there are.
  void sayLastWords();
  // Reads no more of a connection, and notes what is to be said of it. On the loop's thread.
  void end(const std::shared_ptr<Connection>& connection);
  // Sends again what has not come, once that is known. Returns false where the peer contradicts itself.
  bool settle(const std::shared_ptr<Connection>& connection);
  void noteReconnection();
  void noteUnopened(int error, const std::string& text, bool isAnswered);
  void forgetRefusals();
  void watch();
  void lookLater() {
    later(lookInterval(), [](Link& link) { link.lookForSilence(); });
  }

  // Calls on the loop's thread, not under the mutex, if the link is still there then.
  void later(std::chrono::milliseconds delay, std::function<void(Link&)> call);

  // --- On the loop's thread, not under the mutex.
  // A connection is broken; it, or one that could not even be begun (null), was never one.
  void lose(const std::shared_ptr<Connection>& connection, int error, const std::string& text);
  void onUnopened(const std::shared_ptr<Connection>& connection, int error, const std::string& text);
  bool onWelcome(Connection& connection, const Hello& hello);
  bool onEnded(const Connection& teller, uint64_t number, uint64_t frames);
  // Whether somebody else than the peer may be what answers a connection of ours: the peer is reached another way, or
  // may still come by itself.
  bool isStranger(const Connection& connection);
  // Tells the peer what has come: after a while, where nothing else goes back to it.
  void tellLater();
  // Looks whether the peer's kernel still answers, and again after a while.
  void lookForSilence();
  void probe();
  void onProbed(Probe::Result result);
  [[nodiscard]] std::chrono::milliseconds lookInterval() const { return opening_.patience / kLooks; }
  // By then the kernel has found the end of a process on all of its connections.
  [[nodiscard]] std::chrono::milliseconds beforeProbe() const { return lookInterval() * 3 / 2; }

  const std::shared_ptr<EventLoop> loop_;
  const ProcessId self_;
  const ProcessId process_;
  const uint64_t id_;
  const Opening opening_;
  const std::weak_ptr<Transport> transport_;

  std::mutex mutex_;
  SocketAddress address_;
  // A thread has come back from writing.
  std::condition_variable written_;
  std::vector<std::shared_ptr<Connection>> connections_;
  // Connections that have ended, of which the peer has not said its last word.
  std::vector<std::shared_ptr<Connection>> ended_;
  // The last words that this side has not said yet.
  std::vector<Frame> lastWords_;
  // Connections of the peer of which it has said the last word before they came.
  std::set<uint64_t> neverComing_;
  // The link takes no new connection of the peer with a lower number: which of them never come is forgotten.
  uint64_t noneBelow_ = 0;
  uint64_t opened_ = 0;
  LossWatch lossWatch_;
  bool hasAskedForBbr_ = false;
  bool usesBbr_ = false;
  Outbox outbox_;
  // The peer's number of this link, once it has told it.
  std::optional<uint64_t> peerLink_;
  // A peer on this host is sent payloads through memory: that of this process; the other is the peer's.
  bool sharesMemory_ = false;
  std::shared_ptr<PayloadMemory> ownMemory_;
  std::shared_ptr<PayloadMemory> peersMemory_;
  bool isWatched_ = false;

  bool isDialPlanned_ = false;
  // Connections that have ended or could not be opened, since the peer has last told of a frame that has come.
  int failures_ = 0;
  // The link waits no longer than this for a peer that refuses connections, or ends them without a word, once it has
  // done nothing else so many times in a row.
  std::optional<std::chrono::steady_clock::time_point> givesUpAt_;
  int refusals_ = 0;
  // Spare connections that were opened, since one has last become welcome.
  int spares_ = 0;
  std::string lastFailure_;
  // Whether the peer answers at its address, as far as it has been tried; and from where its connections have come.
  enum class Reach { kUntried, kAnswers, kFiltered } reach_ = Reach::kUntried;
  std::string peersSource_;
  bool isProbePlanned_ = false;
  std::shared_ptr<Probe> probe_;
  // A connection beside others that work is not tried again before, if it could not be opened, or files were short.
  static constexpr std::chrono::seconds kWithoutMore{30};
  std::chrono::steady_clock::time_point noMoreBefore_;
  // Connections that have been replaced, and when that was last logged.
  uint64_t reconnections_ = 0;
  std::optional<std::chrono::steady_clock::time_point> logged_;
  // So many looks in a row have found no connection.
  int lonelyLooks_ = 0;
  // Not empty: the peer's process has ended, and the link ends with what its connections still bring.
  std::string lastError_;
  // For those who do not hold the mutex.
  std::atomic<bool> hasPeerDied_ = false;
  // When the peer first refused a connection, where nothing else has come of it since.
  std::optional<std::chrono::steady_clock::time_point> firstRefusal_;
  std::string error_;
  // The groups of which the peer needs nothing any more.
  std::set<uint64_t> left_;
  // error_ is set; this is for those who do not hold the mutex.
  std::atomic<bool> isLost_ = false;

  // --- Of the loop's thread.
  bool isTellPlanned_ = false;
  // Frames that had begun on connections that have ended: they are not charged again when they come again.
  std::set<std::tuple<uint64_t, MessageKey, uint64_t>> interrupted_;
};

}  // namespace bagua::net
