// SPDX-License-Identifier: Apache-2.0
#include "backend/wire/transport.h"

#include <c10/util/Exception.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <random>
#include <utility>

namespace bagua::wire {
namespace {

// Who has connected and said nothing for this long is not one of us.
constexpr std::chrono::seconds kPatienceWithGuests{10};
constexpr size_t kMostGuests = 1024;
// Of groups that were left.
constexpr size_t kMostRemembered = 4096;

uint64_t randomNumber() {
  std::random_device device;
  return (uint64_t{device()} << 32U) | device();
}

}  // namespace

std::string ProcessAddress::toString() const {
  char id[33];
  std::snprintf(id, sizeof(id), "%016llx%016llx", static_cast<unsigned long long>(process[0]),
                static_cast<unsigned long long>(process[1]));
  return std::string(id) + "@" + address.address() + ":" + std::to_string(address.port());
}

ProcessAddress ProcessAddress::parse(const std::string& text) {
  const auto at = text.find('@');
  const auto colon = text.rfind(':');
  unsigned long long high = 0;
  unsigned long long low = 0;
  unsigned int port = 0;
  const bool isComplete = at == 32 && colon != std::string::npos && colon > at &&
                          std::sscanf(text.c_str(), "%16llx%16llx@", &high, &low) == 2 &&
                          std::sscanf(text.c_str() + colon, ":%5u", &port) == 1 && port <= 65535;
  TORCH_CHECK_VALUE(isComplete, "bagua: '", text, "' is not the address of a process");
  return {{high, low}, SocketAddress(text.substr(at + 1, colon - at - 1), static_cast<uint16_t>(port))};
}

// --- Who comes in ----------------------------------------------------------------------------------------------------

// A connection that has not told yet whose it is.
class Transport::Guest final : public EventLoop::Handler {
 public:
  Guest(std::weak_ptr<Transport> transport, FileDescriptor socket)
      : transport_(std::move(transport)), socket_(std::move(socket)) {}

  void onReadable() override {
    const auto transport = transport_.lock();
    if (!transport || !socket_.isOpen()) return;
    const int number = socket_.number();
    const ssize_t size =
        recv(number, reinterpret_cast<uint8_t*>(&hello_) + read_, sizeof(hello_) - read_, MSG_DONTWAIT);
    if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (size > 0) read_ += static_cast<size_t>(size);
    if (size > 0 && read_ < sizeof(hello_)) return;
    transport->loop_->remove(number);
    if (size > 0) transport->welcome(hello_, std::move(socket_));
    socket_ = FileDescriptor();
  }
  void onWritable() override {}

  [[nodiscard]] bool isLate() const {
    return !socket_.isOpen() || std::chrono::steady_clock::now() > since_ + kPatienceWithGuests;
  }
  [[nodiscard]] int number() const { return socket_.number(); }

 private:
  const std::weak_ptr<Transport> transport_;
  FileDescriptor socket_;
  const std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
  Hello hello_;
  size_t read_ = 0;
};

class Transport::Listener final : public EventLoop::Handler {
 public:
  Listener(std::weak_ptr<Transport> transport, int socket) : transport_(std::move(transport)), socket_(socket) {}

  void onReadable() override {
    const auto transport = transport_.lock();
    if (!transport) return;
    while (true) {
      FileDescriptor accepted(accept4(socket_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (!accepted.isOpen()) return;
      dropLate(*transport);
      if (guests_.size() >= kMostGuests) continue;
      configure(accepted);
      const int number = accepted.number();
      guests_.push_back(std::make_shared<Guest>(transport_, std::move(accepted)));
      transport->loop_->add(number, guests_.back(), false);
    }
  }
  void onWritable() override {}

 private:
  void dropLate(Transport& transport) {
    std::erase_if(guests_, [&](const auto& guest) {
      if (!guest->isLate()) return false;
      if (guest->number() >= 0) transport.loop_->remove(guest->number());
      return true;
    });
  }

  const std::weak_ptr<Transport> transport_;
  const int socket_;
  std::deque<std::shared_ptr<Guest>> guests_;
};

std::shared_ptr<Transport> Transport::listenAt(const std::string& address, int mostConnections) {
  return std::shared_ptr<Transport>(new Transport(address, mostConnections));
}

Transport::Transport(const std::string& address, int mostConnections)
    : mostConnections_(mostConnections), listening_(wire::listenAt(SocketAddress(address, 0))) {
  address_ = {{randomNumber(), randomNumber()}, addressOf(listening_)};
}

Transport::~Transport() {
  loop_->stop();
  for (const auto& [process, link] : links_) link->close("this rank has ended its connections");
}

void Transport::welcome(const Hello& hello, FileDescriptor socket) {
  const bool isForUs = hello.magic == Hello::kMagic && hello.version == kVersion && hello.to == address_.process;
  if (!isForUs) return;
  const auto link = linkTo({hello.from, {}});
  if (link->adopt(socket, hello.link)) return;
  // The peer has lost what we took for a connection, and has begun anew.
  link->close("Connection closed by peer");
  linkTo({hello.from, {}})->adopt(socket, hello.link);
}

// --- Links and groups ------------------------------------------------------------------------------------------------

std::shared_ptr<Link> Transport::makeLink(const ProcessAddress& peer) {
  const std::weak_ptr<Transport> weak = weak_from_this();
  Link::Receiver receiver;
  receiver.begin = [weak](const Frame& frame, const std::vector<uint8_t>& context) -> std::shared_ptr<Incoming> {
    const auto transport = weak.lock();
    if (!transport) return nullptr;
    const auto inbox = transport->inboxOf(frame.group);
    auto message = inbox ? inbox->arriving(frame.key) : nullptr;
    if (!message) {
      // Nobody's.
      message = std::make_shared<Incoming>();
      message->cancel();
    }
    return message->begin(frame, context) ? message : nullptr;
  };
  receiver.end = [weak](const Frame& frame) {
    const auto transport = weak.lock();
    const auto inbox = transport ? transport->inboxOf(frame.group) : nullptr;
    if (inbox) inbox->noteFrame(frame.key.source);
  };
  receiver.leave = [weak](const Frame& frame) {
    const auto transport = weak.lock();
    const auto inbox = transport ? transport->inboxOf(frame.group) : nullptr;
    if (!inbox) return;
    inbox->noteLeave(frame.key.source, frame.total,
                     c10::str("Connection closed by peer: rank ", frame.key.source, " has left the group"));
  };
  receiver.lost = [weak, process = peer.process](const std::string& error) {
    const auto transport = weak.lock();
    if (!transport) return;
    std::vector<std::shared_ptr<Group>> groups;
    {
      const std::lock_guard<std::mutex> lock(transport->mutex_);
      for (const auto& [id, group] : transport->groups_) {
        if (auto alive = group.lock()) groups.push_back(std::move(alive));
      }
    }
    for (const auto& group : groups) group->onLost(process, error);
  };
  return std::make_shared<Link>(loop_, address_.process, Link::Peer{peer.process, peer.address}, randomNumber(),
                                mostConnections_, std::move(receiver));
}

std::shared_ptr<Link> Transport::linkTo(const ProcessAddress& peer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& link = links_[peer.process];
  if (link && !link->isLost()) {
    if (peer.address.size() > 0) link->learnAddress(peer.address);
    return link;
  }
  link = makeLink(peer);
  return link;
}

std::shared_ptr<Inbox> Transport::inboxOf(uint64_t group) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (std::find(left_.begin(), left_.end(), group) != left_.end()) return nullptr;
  auto& inbox = inboxes_[group];
  if (!inbox) inbox = std::make_shared<Inbox>();
  return inbox;
}

std::shared_ptr<Group> Transport::join(uint64_t id, int rank, const std::vector<ProcessAddress>& ranks) {
  std::shared_ptr<Group> group;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& inbox = inboxes_[id];
    if (!inbox) inbox = std::make_shared<Inbox>();
    group = std::make_shared<Group>(shared_from_this(), id, rank, ranks, inbox);
    groups_[id] = group;
    if (std::exchange(isAnswering_, true)) return group;
  }
  const int socket = listening_.number();
  loop_->add(socket, std::make_shared<Listener>(shared_from_this(), socket), false);
  return group;
}

void Transport::loseLinksForTest() {
  std::map<ProcessId, std::shared_ptr<Link>> links;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    links = links_;
  }
  for (const auto& [process, link] : links) link->close("reset");
}

void Transport::leave(uint64_t group) {
  const std::lock_guard<std::mutex> lock(mutex_);
  inboxes_.erase(group);
  groups_.erase(group);
  left_.push_back(group);
  if (left_.size() > kMostRemembered) left_.pop_front();
}

Group::Group(std::shared_ptr<Transport> transport, uint64_t id, int rank, std::vector<ProcessAddress> ranks,
             std::shared_ptr<Inbox> inbox)
    : transport_(std::move(transport)),
      id_(id),
      rank_(rank),
      ranks_(std::move(ranks)),
      inbox_(std::move(inbox)),
      links_(ranks_.size()) {}

Group::~Group() { transport_->leave(id_); }

std::shared_ptr<Link> Group::linkTo(int peer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& link = links_[static_cast<size_t>(peer)];
  if (!link) link = transport_->linkTo(ranks_[static_cast<size_t>(peer)]);
  return link;
}

std::unique_ptr<Group::Receiving> Group::receive(int peer, uint64_t stream, uint32_t index, Place place) {
  const MessageKey key{stream, static_cast<uint32_t>(peer), index};
  if (place.room == 0) place.room = place.size;
  auto message = inbox_->find(key);
  message->expectAt(place);
  auto link = place.size > kEagerBytes ? linkTo(peer) : nullptr;
  auto receiving = std::make_unique<Receiving>(inbox_, key, std::move(message), std::move(link), id_, place);
  receiving->use(0);
  return receiving;
}

std::unique_ptr<Group::Sending> Group::send(int peer, uint64_t stream, uint32_t index, Message message) {
  auto outgoing = std::make_shared<Outgoing>();
  outgoing->group = id_;
  outgoing->key = {stream, static_cast<uint32_t>(rank_), index};
  outgoing->data = message.data;
  outgoing->total = message.size;
  outgoing->ready = message.ready;
  outgoing->context = std::move(message.context);
  outgoing->tellsProgress = message.tellsProgress;
  outgoing->signal = std::move(message.signal);
  auto link = linkTo(peer);
  link->send(outgoing);
  return std::make_unique<Sending>(std::move(link), std::move(outgoing));
}

Group::Receiving::Receiving(std::shared_ptr<Inbox> inbox, const MessageKey& key, std::shared_ptr<Incoming> message,
                            std::shared_ptr<Link> link, uint64_t group, const Place& place)
    : inbox_(std::move(inbox)),
      key_(key),
      message_(std::move(message)),
      link_(std::move(link)),
      group_(group),
      size_(place.size),
      room_(place.room) {}

void Group::Receiving::use(uint64_t bytes) {
  if (bytes > 0) message_->use(bytes);
  if (!link_) return;
  const uint64_t place = std::min(bytes + room_, size_);
  // Not of every piece: a place of some size is worth a message.
  const bool isWorthTelling = place == size_ || place - told_ >= room_ / 8;
  if (place <= told_ || !isWorthTelling) return;
  told_ = place;
  link_->tellPlace(group_, key_, place);
}

void Group::leave() {
  std::vector<std::shared_ptr<Link>> links;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (std::exchange(hasLeft_, true)) return;
    links = links_;
  }
  for (const auto& link : links) {
    if (link) link->leave(id_, static_cast<uint32_t>(rank_));
  }
}

void Group::onLost(const ProcessId& process, const std::string& error) {
  for (size_t peer = 0; peer < ranks_.size(); ++peer) {
    if (ranks_[peer].process != process || static_cast<int>(peer) == rank_) continue;
    const std::string text = c10::str(error, " (rank ", peer, " at ", ranks_[peer].address.address(), ")");
    const bool hadLeft = !inbox_->errorOf(static_cast<uint32_t>(peer)).empty();
    inbox_->failAllOf(static_cast<uint32_t>(peer), text);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!hadLeft && !hasLeft_ && links_[peer] && !lost_) lost_ = text;
  }
}

std::optional<std::string> Group::findLost() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return lost_;
}

}  // namespace bagua::wire
