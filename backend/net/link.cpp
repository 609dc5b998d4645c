// SPDX-License-Identifier: Apache-2.0
#include "backend/net/link.h"

#include <c10/util/Exception.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>
#include <utility>

namespace bagua::net {
namespace {

// Below this round trip two connections keep a fast line busy.
constexpr std::chrono::microseconds kDistant{2000};
constexpr int kNearConnections = 2;
// With a distance, what the kernel's buffers let one connection have under way, by default. More connections than the
// line needs overflow the queue before it, and each loss waits for all that is in that queue: with 1, 2, 3, 4, 8 and 16
// of them opened by each side an allreduce of 64 MiB at 1 Gbit/s took 592, 578, 601, 587, 796 and 1579 ms with a round
// trip of 10 ms, and 814, 811, 592, 590, 877 and 2211 with 50 ms; a step of 8.4 MB at 100 Mbit/s and 10 ms took 733,
// 761 and 880 ms with 1, 2 and 4.
constexpr double kBytesOfConnection = 2e6;
// Of places told ahead: what a peer may have this rank remember.
constexpr size_t kMostPlacesAhead = 65536;
// What is worth a cell of the memory that two processes share.
constexpr uint64_t kLeastInMemory = 64U << 10U;
constexpr int kMostLostInHandshake = 20;
// What has to wait before another connection is worth its opening.
constexpr uint64_t kBacklogBytes = 512U << 10U;

template <class Object>
std::vector<uint8_t> bytesOf(const Object& object) {
  const auto* const begin = reinterpret_cast<const uint8_t*>(&object);
  return {begin, begin + sizeof(object)};
}

}  // namespace

// One socket of a link. What is written to it is guarded by the link's mutex, but for the writing itself, which one
// thread at a time does without it.
class Link::Connection final : public EventLoop::Handler, public std::enable_shared_from_this<Connection> {
 public:
  Connection(std::weak_ptr<Link> link, Stream stream, const Receiver& receiver, bool isConnecting)
      : stream_(std::move(stream)),
        isConnecting(isConnecting),
        isBlocked(isConnecting),
        link_(std::move(link)),
        reader_(
            [this, begin = receiver.begin](const Frame& frame,
                                           const std::vector<uint8_t>& context) -> std::shared_ptr<Incoming> {
              auto owner = link_.lock();
              return owner ? begin(frame, context, std::move(owner)) : nullptr;
            },
            receiver.end,
            [this](const Frame& frame, const std::vector<uint8_t>& context) {
              if (const auto owner = link_.lock()) owner->onControl(frame, context);
            },
            [this](uint32_t index, const std::function<void(const uint8_t* payload)>& read) {
              const auto owner = link_.lock();
              return owner && owner->readCell(index, read);
            }) {}

  void onReadable() override {
    const auto link = link_.lock();
    if (!link) return;
    // Also why it cannot connect counts as readable.
    if (isConnecting) return link->onConnecting(shared_from_this());
    link->onRead(shared_from_this(), reader_.read(stream_));
  }
  void onWritable() override {
    const auto link = link_.lock();
    if (!link) return;
    if (isConnecting) return link->onConnecting(shared_from_this());
    link->onWritable(*this);
    // What came with the end of the handshake or with the hello: the socket does not tell of it again.
    if (stream_.hasBuffered()) onReadable();
  }

  [[nodiscard]] int number() const { return stream_.number(); }
  [[nodiscard]] const FileDescriptor& socket() const { return stream_.socket(); }
  [[nodiscard]] Stream& stream() { return stream_; }
  [[nodiscard]] const FrameReader& reader() const { return reader_; }
  [[nodiscard]] bool hasToWrite() const { return headWritten < head.size() || payloadLeft > 0 || stream_.hasUnsent(); }

  // Without the link's mutex. The error, or 0.
  int write() {
    if (const uint32_t number = std::exchange(cell, 0); number > 0) {
      memory->fill(number - 1, payload, payloadLeft);
      payload += std::exchange(payloadLeft, 0);
    }
    while (hasToWrite()) {
      std::array<iovec, 2> parts{
          {{head.data() + headWritten, head.size() - headWritten}, {const_cast<uint8_t*>(payload), payloadLeft}}};
      const ssize_t size = stream_.send(parts);
      if (size < 0) return errno;
      const size_t ofHead = std::min(static_cast<size_t>(size), head.size() - headWritten);
      headWritten += ofHead;
      payload += static_cast<size_t>(size) - ofHead;
      payloadLeft -= static_cast<size_t>(size) - ofHead;
    }
    return 0;
  }

 private:
  Stream stream_;

 public:
  // The frame that is being written.
  std::vector<uint8_t> head;
  size_t headWritten = 0;
  const uint8_t* payload = nullptr;
  uint64_t payloadLeft = 0;
  uint64_t payloadBytes = 0;
  // Not 0: the payload goes into this cell of `memory`, counted from 1, and not on the socket.
  uint32_t cell = 0;
  std::shared_ptr<PayloadMemory> memory;
  // Where the payload lies in its message.
  uint64_t offset = 0;
  std::shared_ptr<Outgoing> message;
  // Payload of a message that was cancelled.
  std::vector<uint8_t> own;

  bool isConnecting = false;
  // While connecting: the other side has answered, and the handshake has begun.
  bool isAnswered = false;
  // The kernel takes no more; the loop tells when it does.
  bool isBlocked = false;
  // A thread is writing.
  bool isBusy = false;
  bool isClosed = false;
  // The peer sends nothing more.
  bool hasEnded = false;

 private:
  const std::weak_ptr<Link> link_;
  FrameReader reader_;
};

Link::Link(std::shared_ptr<EventLoop> loop, const ProcessId& self, Peer peer, uint64_t id, Opening opening,
           Receiver receiver)
    : loop_(std::move(loop)),
      self_(self),
      id_(id),
      opening_(std::move(opening)),
      receiver_(std::move(receiver)),
      peer_(peer) {}

Link::~Link() {
  for (const auto& connection : connections_) loop_->remove(connection->number());
}

void Link::send(const std::shared_ptr<Outgoing>& outgoing) {
  Lock lock(mutex_);
  if (!error_.empty()) return;
  const auto place = placesAhead_.find({outgoing->group, outgoing->key});
  if (place != placesAhead_.end()) {
    outgoing->allowed = std::max(outgoing->allowed, place->second);
    outgoing->placed = place->second;
    placesAhead_.erase(place);
  }
  outgoing->number = submitted_++;
  queue_.push_back(outgoing);
  pump(lock);
}

void Link::makeReady(const std::shared_ptr<Outgoing>& outgoing, uint64_t ready) {
  Lock lock(mutex_);
  outgoing->ready = std::max(outgoing->ready, ready);
  pump(lock);
}

void Link::connect() {
  std::string failure;
  {
    const Lock lock(mutex_);
    if (!error_.empty() || !connections_.empty() || peer_.address.size() == 0) return;
    try {
      open();
    } catch (const c10::Error& error) {
      failure = error.what_without_backtrace();
    }
  }
  if (!failure.empty()) close(failure);
}

void Link::tellPlace(uint64_t group, const MessageKey& key, uint64_t bytes) {
  Lock lock(mutex_);
  if (!error_.empty()) return;
  controls_.push_back(bytesOf(Frame{.kind = Frame::Kind::kPlace, .group = group, .key = key, .total = bytes}));
  pump(lock);
}

void Link::tellCredit(uint64_t group, uint64_t bytes) {
  Lock lock(mutex_);
  if (!error_.empty()) return;
  controls_.push_back(bytesOf(Frame{.kind = Frame::Kind::kCredit, .group = group, .total = bytes}));
  pump(lock);
}

void Link::leave(uint64_t group, uint32_t source) {
  Lock lock(mutex_);
  if (!error_.empty()) return;
  std::erase_if(queue_, [&](const auto& outgoing) { return outgoing->group == group; });
  std::erase_if(placesAhead_, [&](const auto& place) { return place.first.first == group; });
  const auto account = accounts_.find(group);
  const uint64_t count = account == accounts_.end() ? 0 : account->second.frames;
  if (account != accounts_.end()) accounts_.erase(account);
  const MessageKey key{.stream = 0, .source = source, .index = 0};
  controls_.push_back(bytesOf(Frame{.kind = Frame::Kind::kLeave, .group = group, .key = key, .total = count}));
  pump(lock);
}

void Link::onControl(const Frame& frame, const std::vector<uint8_t>& context) {
  switch (frame.kind) {
    case Frame::Kind::kPlace:
      return onPlace(frame);
    case Frame::Kind::kCredit:
      return onCredit(frame);
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
      receiver_.leave(frame);
  }
}

void Link::onPlace(const Frame& frame) {
  Lock lock(mutex_);
  const auto isMeant = [&](const auto& outgoing) {
    return outgoing->group == frame.group && outgoing->key == frame.key;
  };
  if (const auto account = accounts_.find(frame.group); account != accounts_.end()) {
    auto& waiting = account->second.waiting;
    const auto found =
        std::find_if(waiting.begin(), waiting.end(), [&](const auto& one) { return isMeant(one.second); });
    if (found != waiting.end()) {
      queue_.push_front(std::move(found->second));
      waiting.erase(found);
    }
  }
  const auto outgoing = std::find_if(queue_.begin(), queue_.end(), isMeant);
  if (outgoing == queue_.end()) {
    // The answer to a message that has waited, and has gone meanwhile.
    if (frame.total <= kEagerBytes) return;
    // A message that is complete needs no place any more; the sender of one that is to come will look here.
    if (placesAhead_.size() >= kMostPlacesAhead) placesAhead_.erase(placesAhead_.begin());
    auto& ahead = placesAhead_[{frame.group, frame.key}];
    ahead = std::max(ahead, frame.total);
    return;
  }
  (*outgoing)->allowed = std::max((*outgoing)->allowed, frame.total);
  (*outgoing)->placed = std::max((*outgoing)->placed, frame.total);
  pump(lock);
}

void Link::onCredit(const Frame& frame) {
  Lock lock(mutex_);
  const auto account = accounts_.find(frame.group);
  if (account == accounts_.end()) return;
  auto& [frames, unasked, waiting] = account->second;
  unasked -= std::min(unasked, frame.total);
  // As many as find room, in their order.
  std::vector<std::shared_ptr<Outgoing>> going;
  uint64_t planned = unasked;
  for (auto next = waiting.begin(); next != waiting.end() && planned < kUnaskedBytes;) {
    const Outgoing& outgoing = *next->second;
    if (planned + chargeOf(outgoing.payloadBytes()) > outgoing.mostUnasked) {
      ++next;
      continue;
    }
    planned += chargeOf(kMostPayload) + outgoing.sendable() - outgoing.taken;
    going.push_back(std::move(next->second));
    next = waiting.erase(next);
  }
  queue_.insert(queue_.begin(), going.begin(), going.end());
  pump(lock);
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
  if (!memory->release(cell)) return true;
  Lock lock(mutex_);
  if (!error_.empty()) return true;
  controls_.push_back(bytesOf(Frame{.kind = Frame::Kind::kCells}));
  pump(lock);
  return true;
}

// Whether the next frame of a message does. The first that is worth it has the memory made, and goes without.
bool Link::goesThroughMemory(const Outgoing& outgoing) {
  if (!sharesMemory_ || outgoing.payloadBytes() < kLeastInMemory) return false;
  if (ownMemory_) return ownMemory_->isOpened();
  ownMemory_ = PayloadMemory::make();
  if (!ownMemory_) {
    sharesMemory_ = false;
    return false;
  }
  const std::string& name = ownMemory_->name();
  Frame frame{.kind = Frame::Kind::kMemory};
  frame.contextBytes = static_cast<uint16_t>(name.size());
  auto& control = controls_.emplace_back(bytesOf(frame));
  control.insert(control.end(), name.begin(), name.end());
  return false;
}

// --- Messages --------------------------------------------------------------------------------------------------------

Link::State Link::stateOf(const Outgoing& outgoing) {
  const Lock lock(mutex_);
  if (outgoing.isComplete()) {
    return {.isComplete = true, .hasContextGone = true, .gone = outgoing.total, .error = ""};
  }
  State state{.hasContextGone = outgoing.hasBegun, .gone = outgoing.taken, .error = error_};
  for (const auto& connection : connections_) {
    if (connection->message.get() != &outgoing) continue;
    state.gone = std::min(state.gone, connection->offset);
    if (connection->offset == 0) state.hasContextGone = false;
  }
  return state;
}

void Link::cancel(const std::shared_ptr<Outgoing>& outgoing) {
  Lock lock(mutex_);
  outgoing->isCancelled = true;
  std::erase(queue_, outgoing);
  if (const auto account = accounts_.find(outgoing->group); account != accounts_.end()) {
    account->second.waiting.erase(outgoing->number);
  }
  // A copy: while this thread waits, connections may be added and removed.
  for (const auto& connection : std::vector(connections_)) {
    if (connection->message != outgoing) continue;
    written_.wait(lock, [&] { return !connection->isBusy; });
    if (connection->message != outgoing) continue;
    connection->own.assign(connection->payload, connection->payload + connection->payloadLeft);
    connection->payload = connection->own.data();
  }
}

bool Link::isLost() {
  const Lock lock(mutex_);
  return !error_.empty();
}

Line Link::line() {
  const Lock lock(mutex_);
  return lineOfAll();
}

// So many as hold what is on its way when the line is full. One that is short of them shows a rate that asks for more.
int Link::neededConnections() const {
  const Line line = lineOfAll();
  if (line.roundTrip < kDistant) return kNearConnections;
  const double underWay =
      static_cast<double>(line.bytesPerSecond) * std::chrono::duration<double>(line.roundTrip).count();
  return 1 + static_cast<int>(std::min(underWay / kBytesOfConnection, 1e6));
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

int Link::connections() {
  const Lock lock(mutex_);
  return static_cast<int>(connections_.size());
}

// --- Connections -----------------------------------------------------------------------------------------------------

bool Link::adopt(Stream& stream, uint64_t peerLink) {
  Lock lock(mutex_);
  if (!error_.empty() || peerLink_.value_or(peerLink) != peerLink) return false;
  peerLink_ = peerLink;
  const int number = stream.number();
  const bool hasBuffered = stream.hasBuffered();
  const auto connection = std::make_shared<Connection>(weak_from_this(), std::move(stream), receiver_, false);
  connections_.push_back(connection);
  loop_->add(number, connection, hasBuffered);
  pump(lock);
  return true;
}

void Link::learnAddress(const SocketAddress& address) {
  const Lock lock(mutex_);
  peer_.address = address;
}

void Link::open() {
  FileDescriptor socket = startConnecting(peer_.address);
  const int number = socket.number();
  auto encrypted = opening_.encryption ? opening_.encryption->connect(number) : nullptr;
  const auto connection =
      std::make_shared<Connection>(weak_from_this(), Stream(std::move(socket), std::move(encrypted)), receiver_, true);
  Hello hello;
  hello.from = self_;
  hello.to = peer_.process;
  hello.link = id_;
  connection->head = bytesOf(hello);
  connections_.push_back(connection);
  loop_->add(number, connection, true);
}

void Link::openWhereNeeded() {
  const auto count = static_cast<int>(connections_.size());
  // A link that the peer has opened, before any group has told us where it listens: its connections have to do.
  if (peer_.address.size() == 0) return;
  if (count == 0) return open();
  if (count >= opening_.mostConnections) return;
  uint64_t waiting = 0;
  for (const auto& outgoing : queue_) waiting += outgoing->sendable() - outgoing->taken;
  const auto isConnecting = [](const auto& connection) { return connection->isConnecting; };
  if (waiting < kBacklogBytes || std::any_of(connections_.begin(), connections_.end(), isConnecting)) return;
  const int wanted = std::min(neededConnections(), opening_.mostConnections);
  // All at once: one after another would take a round trip each.
  for (int i = count; i < wanted; ++i) open();
}

// Nobody writes to the connection before it is one.
void Link::onConnecting(const std::shared_ptr<Connection>& connection) {
  using Handshake = EncryptedStream::Handshake;
  Stream& stream = connection->stream();
  std::string error = connection->isAnswered ? "" : errorOf(connection->socket());
  connection->isAnswered = error.empty();
  const auto state = error.empty() ? stream.handshake() : Handshake::kFailed;
  if (state == Handshake::kUnderWay) return loop_->askForWritable(connection->number(), stream.hasUnsent());
  if (state == Handshake::kLost && openAnother(connection)) return;
  if (state != Handshake::kDone) {
    if (error.empty()) error = stream.error();
    Lock lock(mutex_);
    const SocketAddress to = peer_.address;
    lock.unlock();
    return close("cannot connect to " + to.address() + " port " + std::to_string(to.port()) + ": " + error);
  }
  {
    const Lock lock(mutex_);
    connection->isConnecting = false;
    lostInHandshake_ = 0;
  }
  connection->onWritable();
}

// A listener that strangers besiege lets go of whoever has not proven itself yet.
bool Link::openAnother(const std::shared_ptr<Connection>& connection) {
  const Lock lock(mutex_);
  if (!error_.empty() || ++lostInHandshake_ > kMostLostInHandshake) return false;
  loop_->remove(connection->number());
  std::erase(connections_, connection);
  try {
    open();
  } catch (const c10::Error&) {
    return false;
  }
  return true;
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

void Link::close(const std::string& reason) {
  std::vector<std::shared_ptr<Connection>> closed;
  std::vector<std::shared_ptr<Signal>> signals;
  {
    const Lock lock(mutex_);
    if (!error_.empty()) return;
    error_ = reason;
    // Kept until the link goes: a thread may be writing to one.
    closed = connections_;
    for (const auto& outgoing : queue_) signals.push_back(outgoing->signal);
    for (const auto& [group, account] : accounts_) {
      for (const auto& [number, outgoing] : account.waiting) signals.push_back(outgoing->signal);
    }
    for (const auto& connection : closed) {
      connection->isClosed = true;
      if (connection->message) signals.push_back(connection->message->signal);
      shutdown(connection->number(), SHUT_RDWR);
    }
    queue_.clear();
    accounts_.clear();
    controls_.clear();
    ownMemory_.reset();
    peersMemory_.reset();
  }
  for (const auto& connection : closed) loop_->remove(connection->number());
  for (const auto& signal : signals) signal->notify();
  receiver_.lost(reason);
}

// --- Writing ---------------------------------------------------------------------------------------------------------

bool Link::giveFrame(Connection& connection) {
  if (!controls_.empty()) {
    connection.head = std::move(controls_.front());
    connection.headWritten = 0;
    controls_.pop_front();
    return true;
  }
  const auto hasFrame = [](const auto& message) { return message->hasFrame(); };
  auto next = std::find_if(queue_.begin(), queue_.end(), hasFrame);
  while (next != queue_.end() && !mayLeave(**next)) {
    const auto outgoing = *next;
    letWait(next);
    if (!std::exchange(outgoing->hasToldOfWaiting, true)) {
      giveFrameOf(outgoing, Frame::Kind::kWaiting, 0, connection);
      return true;
    }
    next = std::find_if(queue_.begin(), queue_.end(), hasFrame);
  }
  if (next == queue_.end()) return false;
  const auto outgoing = *next;
  uint32_t cell = 0;
  if (goesThroughMemory(*outgoing)) {
    const auto taken = ownMemory_->take();
    // The peer says when there is one.
    if (!taken) return false;
    cell = *taken + 1;
  }
  giveFrameOf(outgoing, outgoing->isUnasked() ? Frame::Kind::kUnasked : Frame::Kind::kData, cell, connection);
  return true;
}

bool Link::mayLeave(const Outgoing& outgoing) {
  if (!outgoing.isUnasked()) return true;
  return accounts_[outgoing.group].unasked + chargeOf(outgoing.payloadBytes()) <= outgoing.mostUnasked;
}

void Link::letWait(const std::deque<std::shared_ptr<Outgoing>>::iterator& message) {
  const auto& outgoing = *message;
  accounts_[outgoing->group].waiting.emplace(outgoing->number, outgoing);
  queue_.erase(message);
}

void Link::giveFrameOf(const std::shared_ptr<Outgoing>& owner, Frame::Kind kind, uint32_t cell,
                       Connection& connection) {
  Outgoing& outgoing = *owner;
  Frame frame{.kind = kind, .group = outgoing.group, .key = outgoing.key, .total = outgoing.total};
  frame.offset = outgoing.taken;
  frame.payloadBytes = kind == Frame::Kind::kWaiting ? 0 : outgoing.payloadBytes();
  frame.cell = cell;
  connection.memory = cell > 0 ? ownMemory_ : nullptr;
  connection.cell = cell;
  const bool isFirst = outgoing.taken == 0;
  frame.contextBytes = isFirst ? static_cast<uint16_t>(outgoing.context.size()) : 0;
  connection.head = bytesOf(frame);
  if (isFirst) {
    connection.head.insert(connection.head.end(), outgoing.context.begin(), outgoing.context.end());
  }
  connection.headWritten = 0;
  connection.payload = outgoing.data + outgoing.taken;
  connection.payloadLeft = frame.payloadBytes;
  connection.payloadBytes = frame.payloadBytes;
  connection.offset = frame.offset;
  connection.message = owner;
  auto& account = accounts_[outgoing.group];
  ++account.frames;
  if (kind == Frame::Kind::kUnasked) account.unasked += chargeOf(frame.payloadBytes);
  outgoing.hasBegun = true;
  outgoing.taken += frame.payloadBytes;
  if (outgoing.taken == outgoing.total) std::erase(queue_, owner);
}

void Link::afterWriting(Connection& connection, std::vector<std::shared_ptr<Signal>>& signals) {
  if (connection.hasToWrite()) return;
  connection.head.clear();
  connection.headWritten = 0;
  connection.own.clear();
  connection.memory.reset();
  const auto message = std::exchange(connection.message, nullptr);
  if (!message) return;
  message->sent += std::exchange(connection.payloadBytes, 0);
  if (message->isComplete() || message->tellsProgress) signals.push_back(message->signal);
}

void Link::pump(Lock& lock) {
  std::vector<std::shared_ptr<Signal>> signals;
  std::string failure;
  while (error_.empty() && failure.empty()) {
    const auto isFree = [](const auto& connection) {
      return !connection->isBlocked && !connection->isBusy && !connection->isClosed;
    };
    // What is half written first; then a connection that a frame can be given to.
    std::shared_ptr<Connection> connection;
    for (const auto& candidate : connections_) {
      if (isFree(candidate) && (candidate->hasToWrite() || giveFrame(*candidate))) {
        connection = candidate;
        break;
      }
    }
    if (!connection) break;
    connection->isBusy = true;
    lock.unlock();
    const int error = connection->write();
    lock.lock();
    connection->isBusy = false;
    written_.notify_all();
    afterWriting(*connection, signals);
    if (error == EAGAIN || error == EWOULDBLOCK) {
      connection->isBlocked = true;
      loop_->askForWritable(connection->number(), true);
    } else if (error != 0 && error != EINTR) {
      failure = "Connection closed by peer: " + std::generic_category().message(error);
    }
  }
  if (error_.empty() && failure.empty() && (!queue_.empty() || !controls_.empty())) {
    try {
      openWhereNeeded();
    } catch (const c10::Error& error) {
      failure = error.what_without_backtrace();
    }
  }
  lock.unlock();
  for (const auto& signal : signals) signal->notify();
  if (!failure.empty()) close(failure);
}

}  // namespace bagua::net
