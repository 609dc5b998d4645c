// SPDX-License-Identifier: Apache-2.0
#include "backend/net/link.h"

#include <c10/util/Exception.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

namespace bagua::net {
namespace {

// Below this round trip two connections keep a fast line busy.
constexpr std::chrono::microseconds kDistant{2000};
constexpr int kNearConnections = 2;
// Over a distance, the kernel's buffers let one connection have this much under way, by default. More connections than
// the line needs overflow the queue before it, and each loss waits for all that is in that queue: with 1, 2, 3, 4, 8
// and 16 of them opened by each side an allreduce of 64 MiB at 1 Gbit/s took 592, 578, 601, 587, 796 and 1579 ms with a
// round trip of 10 ms, and 814, 811, 592, 590, 877 and 2211 with 50 ms; a step of 8.4 MB at 100 Mbit/s and 10 ms took
// 733, 761 and 880 ms with 1, 2 and 4.
constexpr double kBytesOfConnection = 2e6;
// A smaller payload is not worth a cell of the memory that two processes share.
constexpr uint64_t kLeastInMemory = 64U << 10U;
// Less backlog is not worth the opening of another connection.
constexpr uint64_t kBacklogBytes = 512U << 10U;
// A link looks so many times for a sign of the peer before its patience is over. It counts looks and not seconds: while
// this process or its machine was stopped, nobody could see a sign.
constexpr int kLooks = 8;

}  // namespace

Link::Link(std::shared_ptr<EventLoop> loop, const ProcessId& self, Peer peer, uint64_t id, Opening opening,
           std::weak_ptr<Owner> owner)
    : loop_(std::move(loop)),
      self_(self),
      process_(peer.process),
      id_(id),
      opening_(std::move(opening)),
      owner_(std::move(owner)),
      address_(peer.address) {}

Link::~Link() {
  for (const auto& connection : connections_) loop_->remove(connection->number());
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
  if (message.isComplete()) return {.isComplete = true, .hasContextGone = true, .gone = message.total, .error = ""};
  return {.hasContextGone = message.hasContextGone(), .gone = message.gone(), .error = error_};
}

void Link::cancel(const std::shared_ptr<Outgoing>& message) {
  Lock lock(mutex_);
  outbox_.cancel(message);
  // A copy: connections may be added while this thread waits, which it does for frames of this message only.
  for (const auto& connection : std::vector(connections_)) {
    written_.wait(lock, [&] { return !connection->isBusy || !connection->carries(*message); });
    if (connection->carries(*message)) connection->copyPayload();
  }
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

Delivery Link::begin(const Frame& frame, const std::vector<uint8_t>& context) {
  const auto owner = owner_.lock();
  if (!owner) return {};
  auto delivery = owner->begin(frame, context, shared_from_this());
  // The loss may have been told just before the inbox knew that something comes over this link.
  if (isLost_ && delivery.inbox) delivery.inbox->failAllOver(*this, "Connection closed by peer");
  return delivery;
}

void Link::control(const Frame& frame, const std::vector<uint8_t>& context) {
  switch (frame.kind) {
    case Frame::Kind::kPlace: {
      Lock lock(mutex_);
      outbox_.grantPlace(frame.group, frame.key, frame.total);
      return pump(lock);
    }
    case Frame::Kind::kCredit: {
      Lock lock(mutex_);
      outbox_.grantCredit(frame.group, frame.total);
      return pump(lock);
    }
    case Frame::Kind::kMemory: {
      // Null where it cannot be seen from here: the peer does without.
      auto memory = PayloadMemory::open({context.begin(), context.end()});
      const Lock lock(mutex_);
      if (!peersMemory_) peersMemory_ = std::move(memory);
      return;
    }
    case Frame::Kind::kCells: {
      Lock lock(mutex_);
      return pump(lock);
    }
    default:
      if (const auto owner = owner_.lock()) owner->onLeave(frame);
  }
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

// --- Connections -----------------------------------------------------------------------------------------------------

void Link::connect() {
  std::string failure;
  {
    const Lock lock(mutex_);
    if (!error_.empty() || !connections_.empty() || address_.size() == 0) return;
    try {
      open();
    } catch (const c10::Error& error) {
      failure = error.what_without_backtrace();
    }
  }
  if (!failure.empty()) close(failure);
}

Line Link::line() {
  const Lock lock(mutex_);
  return lineOfAll();
}

Line Link::lineOfAll() const {
  Line all;
  for (const auto& connection : connections_) {
    if (connection->isConnecting || connection->isClosed) continue;
    const Line line = lineOf(connection->socket());
    all.roundTrip = all.roundTrip.count() == 0 ? line.roundTrip : std::min(all.roundTrip, line.roundTrip);
    all.bytesPerSecond += line.bytesPerSecond;
  }
  return all;
}

// Returns as many as hold what is on its way when the line is full. Fewer of them show a rate that asks for more.
int Link::neededConnections() const {
  const Line line = lineOfAll();
  if (line.roundTrip < kDistant) return kNearConnections;
  const double underWay =
      static_cast<double>(line.bytesPerSecond) * std::chrono::duration<double>(line.roundTrip).count();
  return 1 + static_cast<int>(std::min(underWay / kBytesOfConnection, 1e6));
}

void Link::learnAddress(const SocketAddress& address) {
  const Lock lock(mutex_);
  address_ = address;
}

bool Link::adopt(Stream& stream, uint64_t peerLink) {
  Lock lock(mutex_);
  if (!error_.empty() || peerLink_.value_or(peerLink) != peerLink) return false;
  peerLink_ = peerLink;
  const bool hasBuffered = stream.hasBuffered();
  add(std::make_shared<Connection>(weak_from_this(), std::move(stream)), hasBuffered);
  pump(lock);
  return true;
}

void Link::open() {
  FileDescriptor socket = startConnecting(address_);
  auto encrypted = opening_.encryption ? opening_.encryption->connect(socket.number()) : nullptr;
  const Hello hello{.from = self_, .to = process_, .link = id_};
  add(std::make_shared<Connection>(weak_from_this(), Stream(std::move(socket), std::move(encrypted)), hello), true);
}

void Link::add(const std::shared_ptr<Connection>& connection, bool wantsWritable) {
  connections_.push_back(connection);
  loop_->add(connection->number(), connection, wantsWritable);
  if (!std::exchange(isWatched_, true)) lookLater();
}

void Link::lookLater() {
  loop_->callLater(opening_.patience / kLooks, [weak = weak_from_this()] {
    if (const auto link = weak.lock()) link->lookForSilence();
  });
}

void Link::openWhereNeeded() {
  const auto count = static_cast<int>(connections_.size());
  // The peer has opened the link, and no group has told us yet where it listens: its connections have to do.
  if (address_.size() == 0) return;
  if (count == 0) return open();
  if (count >= opening_.mostConnections) return;
  const auto isConnecting = [](const auto& connection) { return connection->isConnecting; };
  if (outbox_.backlog() < kBacklogBytes || std::any_of(connections_.begin(), connections_.end(), isConnecting)) return;
  const int wanted = std::min(neededConnections(), opening_.mostConnections);
  // All at once: one after another would take a round trip each.
  for (int i = count; i < wanted; ++i) open();
}

void Link::onConnecting(const std::shared_ptr<Connection>& connection) {
  using Handshake = EncryptedStream::Handshake;
  // No other thread writes to the connection before it is one.
  Stream& stream = connection->stream();
  std::string error = connection->isAnswered ? "" : errorOf(connection->socket());
  connection->isAnswered = error.empty();
  const auto state = error.empty() ? stream.handshake() : Handshake::kFailed;
  if (state == Handshake::kUnderWay) return loop_->askForWritable(connection->number(), stream.hasUnsent());
  Lock lock(mutex_);
  connection->isConnecting = state != Handshake::kDone;
  const SocketAddress to = address_;
  lock.unlock();
  if (state == Handshake::kDone) return connection->onWritable();
  if (error.empty()) error = stream.error();
  close("cannot connect to " + to.address() + " port " + std::to_string(to.port()) + ": " + error);
}

void Link::onWritable(Connection& connection) {
  Lock lock(mutex_);
  if (connection.isClosed || connection.isBusy) return;
  connection.isBlocked = false;
  loop_->askForWritable(connection.number(), false);
  pump(lock);
}

void Link::onRead(const std::shared_ptr<Connection>& connection, FrameReader::Result result) {
  using Result = FrameReader::Result;
  if (result == Result::kMore || result == Result::kDry) return;
  const bool isEnd = result == Result::kEnd && !connection->reader().isInFrame();
  if (!isEnd) {
    const std::string why = result == Result::kEnd ? "in the middle of a message" : connection->reader().error();
    return close("Connection closed by peer: " + why);
  }
  Lock lock(mutex_);
  connection->hasEnded = true;
  loop_->remove(connection->number());
  // The others may still hold what the peer has sent before it ended.
  if (!std::all_of(connections_.begin(), connections_.end(), [](const auto& other) { return other->hasEnded; })) return;
  lock.unlock();
  close("Connection closed by peer");
}

// A stopped process still has a kernel that acknowledges; a host without power, or behind a cut line, has not. The
// kernel's own limits do not tell these apart: TCP_USER_TIMEOUT also ends a connection whose receiver has no room.
// Keepalives (see configure) find the same where nothing is under way.
void Link::lookForSilence() {
  bool isOver = false;
  {
    const Lock lock(mutex_);
    if (!error_.empty()) return;
    for (const auto& connection : connections_) {
      if (connection->isConnecting || connection->hasEnded) continue;
      const bool isSilent = unansweredFor(connection->socket()) >= opening_.patience / kLooks;
      connection->silentLooks = isSilent ? connection->silentLooks + 1 : 0;
      if (connection->silentLooks >= kLooks) isOver = true;
    }
  }
  if (!isOver) return lookLater();
  close("Connection closed by peer: its host has acknowledged nothing for " +
        std::to_string(std::chrono::ceil<std::chrono::seconds>(opening_.patience).count()) + " s");
}

void Link::close(const std::string& reason) {
  std::vector<std::shared_ptr<Connection>> closed;
  std::vector<std::shared_ptr<Signal>> signals;
  {
    const Lock lock(mutex_);
    if (!error_.empty()) return;
    error_ = reason;
    isLost_ = true;
    // They are kept until the link goes: a thread may be writing to one.
    closed = connections_;
    signals = outbox_.clear();
    for (const auto& connection : closed) {
      connection->isClosed = true;
      signals.push_back(connection->signal());
      shutdown(connection->number(), SHUT_RDWR);
    }
    ownMemory_.reset();
    peersMemory_.reset();
  }
  for (const auto& connection : closed) loop_->remove(connection->number());
  for (const auto& signal : signals) {
    if (signal) signal->notify();
  }
  if (const auto owner = owner_.lock()) owner->onLost(*this, reason);
}

// --- Writing ---------------------------------------------------------------------------------------------------------

bool Link::giveFrame(Connection& connection) {
  auto frame = outbox_.next([this](uint32_t payloadBytes) { return chooseCell(payloadBytes); });
  if (!frame) return false;
  connection.give(std::move(*frame), ownMemory_);
  return true;
}

void Link::pump(Lock& lock) {
  std::vector<std::shared_ptr<Signal>> signals;
  std::string failure;
  while (error_.empty() && failure.empty()) {
    // A connection that has half written a frame goes on; else the first that takes one does.
    const auto found = std::find_if(connections_.begin(), connections_.end(), [&](const auto& candidate) {
      return candidate->isFree() && (candidate->hasToWrite() || giveFrame(*candidate));
    });
    if (found == connections_.end()) break;
    const auto connection = *found;
    connection->isBusy = true;
    lock.unlock();
    const int error = connection->write();
    lock.lock();
    connection->isBusy = false;
    written_.notify_all();
    if (const auto frame = connection->takeWritten()) signals.push_back(Outbox::finish(*frame));
    if (error == EAGAIN || error == EWOULDBLOCK) {
      connection->isBlocked = true;
      loop_->askForWritable(connection->number(), true);
    } else if (error != 0 && error != EINTR) {
      failure = "Connection closed by peer: " + std::generic_category().message(error);
    }
  }
  if (error_.empty() && failure.empty() && !outbox_.isEmpty()) {
    try {
      openWhereNeeded();
    } catch (const c10::Error& error) {
      failure = error.what_without_backtrace();
    }
  }
  lock.unlock();
  for (const auto& signal : signals) {
    if (signal) signal->notify();
  }
  if (!failure.empty()) close(failure);
}

}  // namespace bagua::net
