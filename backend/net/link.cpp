// SPDX-License-Identifier: Apache-2.0
#include "backend/net/link.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <limits>
#include <utility>

#include "backend/config.h"
#include "backend/net/transport.h"

namespace bagua::net {
namespace {

// A smaller payload is not worth a cell of the memory that two processes share.
constexpr uint64_t kLeastInMemory = 64U << 10U;

}  // namespace

Link::Link(std::shared_ptr<EventLoop> loop, const ProcessId& self, Peer peer, uint64_t id, Opening opening,
           std::weak_ptr<Transport> transport)
    : loop_(std::move(loop)),
      self_(self),
      process_(peer.process),
      id_(id),
      opening_(std::move(opening)),
      transport_(std::move(transport)),
      address_(peer.address) {}

Link::~Link() {
  for (const auto& connection : connections_) loop_->remove(connection->socket().number());
  if (probe_) probe_->stop();
}

// --- Messages --------------------------------------------------------------------------------------------------------

void Link::send(const std::shared_ptr<Outgoing>& message) {
  Lock lock(mutex_);
  if (!error_.empty()) return;
  outbox_.add(message);
  pump(lock);
}

void Link::makeReady(const std::shared_ptr<Outgoing>& message, uint64_t ready) {
  Lock lock(mutex_);
  message->ready = std::max(message->ready, ready);
  pump(lock);
}

Link::State Link::stateOf(const Outgoing& message) {
  const Lock lock(mutex_);
  const uint64_t released = message.released();
  if (message.isComplete()) {
    return {.isComplete = true,
            .isCut = true,
            .hasContextGone = true,
            .gone = message.size,
            .released = released,
            .error = ""};
  }
  return {.isCut = message.hasBegun && message.cut == message.size,
          .hasContextGone = message.hasContextGone(),
          .gone = message.gone(),
          .released = released,
          .error = message.isTooLate ? "this rank has left the group" : error_};
}

void Link::release(const std::shared_ptr<Outgoing>& message, uint64_t end) {
  Lock lock(mutex_);
  while (message->released() < std::min(end, message->cut)) {
    bool isBusy = false;
    for (const auto* const connections : {&connections_, &ended_}) {
      for (const auto& connection : *connections) {
        // A thread is just writing the frame. It takes what the kernel takes, and comes back.
        const bool isWriting = connection->isBusy && connection->carries(*message, end);
        isBusy = isBusy || isWriting;
        if (!isWriting) connection->copyPayloads(*message, end);
      }
    }
    outbox_.copyPayloads(*message, end);
    if (!isBusy) return;
    written_.wait(lock);
  }
}

void Link::giveUp(const std::shared_ptr<Outgoing>& message) {
  {
    const Lock lock(mutex_);
    if (!message->isComplete()) outbox_.cancel(message);
    if (message->reading.empty()) return;
  }
  try {
    release(message, std::numeric_limits<uint64_t>::max());
  } catch (const std::exception& error) {
    // What cannot be copied could not be sent again.
    close(std::string("what is on its way could not be kept: ") + error.what());
  }
}

void Link::askPeer() {
  Lock lock(mutex_);
  for (const auto& connection : connections_) connection->isToAsk = !connection->sent().isEmpty();
  pump(lock);
}

uint64_t Link::awaited() {
  const Lock lock(mutex_);
  if (!error_.empty()) return 0;
  uint64_t count = ended_.size() + (outbox_.sendsAgain() ? 1 : 0);
  for (const auto& connection : connections_) count += connection->sent().unacknowledged();
  return count;
}

bool Link::isBroken() {
  const Lock lock(mutex_);
  if (!error_.empty() || hasWelcome()) return false;
  const auto isNeeded = [&](const OutgoingFrame& frame) {
    return frame.message && !left_.contains(frame.header.group);
  };
  return outbox_.sendsAgain(isNeeded) || std::ranges::any_of(ended_, [&](const auto& connection) {
           return connection->sent().anyUnacknowledged(isNeeded);
         });
}

void Link::sendControl(const Frame& frame) {
  Lock lock(mutex_);
  if (!error_.empty()) return;
  outbox_.addControl(frame);
  pump(lock);
}

void Link::grantPlace(uint64_t group, const MessageKey& key, uint64_t bytes) {
  sendControl({.kind = Frame::Kind::kPlace, .group = group, .key = key, .total = bytes});
}

void Link::grantCredit(uint64_t group, uint64_t bytes) {
  sendControl({.kind = Frame::Kind::kCredit, .group = group, .total = bytes});
}

void Link::leave(uint64_t group, uint32_t source) {
  Lock lock(mutex_);
  if (!error_.empty()) return;
  const MessageKey key{.stream = 0, .source = source, .index = 0};
  outbox_.addControl({.kind = Frame::Kind::kLeave, .group = group, .key = key, .total = outbox_.leave(group)});
  pump(lock);
}

void Link::noteLeft(uint64_t group) {
  const Lock lock(mutex_);
  left_.insert(group);
}

Delivery Link::begin(const Frame& frame, const std::vector<uint8_t>& context) {
  const auto transport = transport_.lock();
  if (!transport) return {};
  Frame charged = frame;
  // It has been charged when it came for the first time.
  if (frame.payloadBytes > 0 && interrupted_.erase({frame.group, frame.key, frame.offset}) > 0) {
    charged.kind = Frame::Kind::kData;
  }
  auto delivery = transport->begin(charged, context, shared_from_this());
  // The loss may have been told just before the inbox knew that something comes over this link.
  if (isLost_ && delivery.inbox) delivery.inbox->failAllOver(*this, "Connection closed by peer");
  return delivery;
}

bool Link::control(Connection& connection, const Frame& frame, const std::vector<uint8_t>& context) {
  Lock lock(mutex_, std::defer_lock);
  switch (frame.kind) {
    case Frame::Kind::kPlace:
      lock.lock();
      outbox_.grantPlace(frame.group, frame.key, frame.total);
      pump(lock);
      return true;
    case Frame::Kind::kCredit:
      lock.lock();
      outbox_.grantCredit(frame.group, frame.total);
      pump(lock);
      return true;
    case Frame::Kind::kMemory: {
      // Null where it cannot be seen from here, or is not wanted: the peer does without.
      auto memory = config::usesSharedMemory() ? PayloadMemory::open({context.begin(), context.end()}) : nullptr;
      lock.lock();
      if (!peersMemory_) peersMemory_ = std::move(memory);
      return true;
    }
    case Frame::Kind::kCells:
      lock.lock();
      pump(lock);
      return true;
    case Frame::Kind::kReceived:
      if (frame.total == 0) return true;
      lock.lock();
      connection.isToTell = connection.owesWord();
      pump(lock);
      return true;
    case Frame::Kind::kWelcome: {
      const auto hello = fromBytes<Hello>(context);
      return hello && onWelcome(connection, *hello);
    }
    case Frame::Kind::kEnded:
      return onEnded(connection, frame.key.stream, frame.total);
    case Frame::Kind::kAskForLeave:
      if (const auto transport = transport_.lock()) transport->onAskForLeave(frame, *this);
      return true;
    case Frame::Kind::kAbsent:
      noteLeft(frame.group);
      if (const auto transport = transport_.lock()) transport->onAbsent(*this, frame.group);
      return true;
    default:
      noteLeft(frame.group);
      if (const auto transport = transport_.lock()) transport->onLeave(frame);
      return true;
  }
}

bool Link::acknowledge(Connection& connection, uint64_t received) {
  const Lock lock(mutex_);
  failures_ = 0;
  return connection.sent().acknowledge(received);
}

// --- Memory that is shared with a peer on this host ------------------------------------------------------------------

void Link::shareMemory() {
  const Lock lock(mutex_);
  sharesMemory_ = true;
}

bool Link::readCell(uint32_t cell, const std::function<void(const uint8_t* payload)>& read) {
  std::shared_ptr<PayloadMemory> memory;
  {
    const Lock lock(mutex_);
    memory = peersMemory_;
  }
  if (!memory) return false;
  read(memory->cell(cell));
  if (memory->release(cell)) sendControl({.kind = Frame::Kind::kCells});
  return true;
}

std::optional<uint32_t> Link::chooseCell(uint32_t payloadBytes) {
  if (!sharesMemory_ || payloadBytes < kLeastInMemory) return 0;
  if (ownMemory_) {
    if (!ownMemory_->isOpened()) return 0;
    // If none is free, the peer says when one is.
    const auto taken = ownMemory_->take();
    return taken ? std::optional(*taken + 1) : std::nullopt;
  }
  // The first payload that is worth it has the memory made, and goes without.
  ownMemory_ = PayloadMemory::make();
  sharesMemory_ = ownMemory_ != nullptr;
  if (!ownMemory_) return 0;
  const std::string& name = ownMemory_->name();
  Frame header{.kind = Frame::Kind::kMemory};
  header.contextBytes = static_cast<uint16_t>(name.size());
  outbox_.addControl(header, {name.begin(), name.end()});
  return 0;
}

void Link::close(Lock& lock, std::string reason) {
  if (!error_.empty()) return;
  error_ = std::move(reason);
  const auto probe = std::move(probe_);
  isLost_ = true;
  // They are kept until the link goes: a thread may be writing to one.
  auto closed = connections_;
  closed.insert(closed.end(), ended_.begin(), ended_.end());
  auto signals = outbox_.clear();
  for (const auto& connection : closed) {
    connection->isClosed = true;
    connection->sent().clear();
    signals.push_back(connection->signal());
    shutdown(connection->socket().number(), SHUT_RDWR);
  }
  ownMemory_.reset();
  peersMemory_.reset();
  lock.unlock();
  for (const auto& connection : closed) loop_->remove(connection->socket().number());
  if (probe) probe->stop();
  for (const auto& signal : signals) {
    if (signal) signal->notify();
  }
  // Nobody changes the error any more.
  if (const auto transport = transport_.lock()) transport->onLost(*this, error_);
}

// --- Writing ---------------------------------------------------------------------------------------------------------

bool Link::giveFrame(Connection& connection) {
  if (!outbox_.isEmpty()) outbox_.limitPayload(payloadFor(connection));
  auto frame = outbox_.next([this](uint32_t payloadBytes) { return chooseCell(payloadBytes); });
  if (!frame) {
    const bool isToAsk = std::exchange(connection.isToAsk, false);
    if (!isToAsk && !(connection.isToTell && connection.owesWord())) return false;
    frame.emplace(OutgoingFrame{.header = {.kind = Frame::Kind::kReceived, .total = isToAsk ? 1U : 0U}});
  }
  connection.give(std::move(*frame), ownMemory_);
  return true;
}

void Link::pump(Lock& lock) {
  std::vector<std::shared_ptr<Signal>> signals;
  // They go without the mutex: what one was just reading may be the last of its group, and gives credit over this link.
  std::vector<std::shared_ptr<Connection>> ended;
  std::string failure;
  while (error_.empty() && failure.empty()) {
    // A connection that has half written a frame goes on; else the first that takes one does.
    const auto found = std::ranges::find_if(connections_, [&](const auto& candidate) {
      return candidate->isFree() && (candidate->hasToWrite() || (!candidate->isSpare && giveFrame(*candidate)));
    });
    if (found == connections_.end()) break;
    const auto connection = *found;
    connection->isBusy = true;
    lock.unlock();
    const int error = connection->write();
    lock.lock();
    connection->isBusy = false;
    written_.notify_all();
    if (auto frame = connection->takeWritten()) {
      signals.push_back(Outbox::finish(*frame));
      if (isCounted(frame->header)) connection->sent().keep(std::move(*frame));
    }
    if (connection->isClosed) {
      ended.push_back(connection);
      // The link has ended meanwhile, or the connection has, and waited for this thread.
      if (!error_.empty() || !connection->lastWord) continue;
      if (!settle(connection)) failure = "Connection closed by peer: frames are said to have come that were not sent";
    } else if (error == EAGAIN || error == EWOULDBLOCK) {
      connection->isBlocked = true;
      loop_->askForWritable(connection->socket().number(), true);
    } else if (error != 0 && error != EINTR) {
      // The loop finds what has still come, and then the end.
      connection->isBlocked = true;
      shutdown(connection->socket().number(), SHUT_RDWR);
    }
  }
  if (error_.empty() && failure.empty() && !outbox_.isEmpty()) openWhereNeeded();
  lock.unlock();
  for (const auto& signal : signals) {
    if (signal) signal->notify();
  }
  if (!failure.empty()) close(failure);
}

}  // namespace bagua::net
