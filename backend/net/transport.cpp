// SPDX-License-Identifier: Apache-2.0
#include "backend/net/transport.h"

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <random>
#include <utility>

namespace bagua::net {
namespace {

// Who has connected and said nothing for this long is not one of us.
constexpr std::chrono::seconds kPatienceWithGuests{10};
constexpr size_t kMostGuests = 1024;
constexpr size_t kFewestGuests = 64;
constexpr int kAcceptedAtATime = 64;
constexpr std::chrono::minutes kRefusalInterval{1};
// Of groups that were left.
constexpr size_t kMostRemembered = 4096;

uint64_t randomNumber() {
  std::random_device device;
  return (uint64_t{device()} << 32U) | device();
}

std::string peerOf(const FileDescriptor& socket) {
  sockaddr_storage storage{};
  socklen_t size = sizeof(storage);
  if (getpeername(socket.number(), reinterpret_cast<sockaddr*>(&storage), &size) != 0) return "somewhere";
  return SocketAddress(reinterpret_cast<sockaddr*>(&storage), size).address();
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
  uint64_t high = 0;
  uint64_t low = 0;
  uint16_t port = 0;
  const auto isNumber = [&](size_t begin, size_t end, auto& value, int base) {
    const char* const last = text.data() + end;
    const auto [stop, error] = std::from_chars(text.data() + begin, last, value, base);
    return error == std::errc() && stop == last;
  };
  const bool isComplete = at == 32 && colon != std::string::npos && colon > at && isNumber(0, 16, high, 16) &&
                          isNumber(16, 32, low, 16) && isNumber(colon + 1, text.size(), port, 10);
  TORCH_CHECK_VALUE(isComplete, "bagua: '", text, "' is not the address of a process");
  return {{high, low}, SocketAddress(text.substr(at + 1, colon - at - 1), port)};
}

// --- Who comes in ----------------------------------------------------------------------------------------------------

// A connection that has not told yet whose it is, nor shown that it may be here.
class Transport::Guest final : public EventLoop::Handler {
 public:
  Guest(std::weak_ptr<Transport> transport, Stream stream)
      : transport_(std::move(transport)), stream_(std::move(stream)) {}

  void onReadable() override {
    const auto transport = transport_.lock();
    if (!transport || !stream_.isOpen()) return;
    if (!isWelcome_) {
      const auto state = stream_.handshake();
      const bool isUnderWay = state == EncryptedStream::Handshake::kUnderWay;
      if (isUnderWay) return transport->guestLoop_->askForWritable(stream_.number(), stream_.hasUnsent());
      isWelcome_ = state == EncryptedStream::Handshake::kDone;
      if (!isWelcome_) return turnAway(*transport);
    }
    hear(*transport);
  }
  void onWritable() override { onReadable(); }

  [[nodiscard]] bool isLate() const {
    return !stream_.isOpen() || std::chrono::steady_clock::now() > since_ + kPatienceWithGuests;
  }
  [[nodiscard]] bool hasGone() const { return !stream_.isOpen(); }
  // Gives it as long again, once: a ClientHello that was recorded shows the secret too.
  [[nodiscard]] bool spare() {
    since_ = std::chrono::steady_clock::now();
    return !std::exchange(isSpared_, true);
  }
  // Whether it may still be anybody.
  [[nodiscard]] bool isStranger() const { return !stream_.isProven(); }
  // On the thread of its events. Not to be called where it has gone.
  void leave(Transport& transport) {
    if (!stream_.isOpen()) return;
    transport.guestLoop_->remove(stream_.number());
    stream_.close();
  }

 private:
  void hear(Transport& transport) {
    auto* const place = reinterpret_cast<uint8_t*>(&hello_) + read_;
    const ssize_t size = stream_.receive(place, sizeof(hello_) - read_);
    if (size < 0 && (errno == EAGAIN || errno == EINTR)) {
      return transport.guestLoop_->askForWritable(stream_.number(), stream_.hasUnsent());
    }
    if (size > 0) read_ += static_cast<size_t>(size);
    if (size > 0 && read_ < sizeof(hello_)) return;
    transport.guestLoop_->remove(stream_.number());
    if (size > 0) transport.welcome(hello_, std::move(stream_));
    stream_.close();
  }

  void turnAway(Transport& transport) {
    // One that ends by itself has had enough of us: it says so where it matters.
    transport.noteRefusal(stream_);
    leave(transport);
  }

  const std::weak_ptr<Transport> transport_;
  Stream stream_;
  std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
  bool isWelcome_ = false;
  bool isSpared_ = false;
  Hello hello_;
  size_t read_ = 0;
};

class Transport::Listener final : public EventLoop::Handler {
 public:
  Listener(std::weak_ptr<Transport> transport, int socket)
      : transport_(std::move(transport)), socket_(socket), mostGuests_(mostGuests()) {}

  void onReadable() override {
    const auto transport = transport_.lock();
    if (!transport) return;
    // A few at a time: guests that are here already have their turn in between.
    for (int i = 0; i < kAcceptedAtATime; ++i) {
      FileDescriptor accepted(accept4(socket_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (!accepted.isOpen()) return;
      makeRoom(*transport);
      try {
        letIn(*transport, std::move(accepted));
      } catch (const std::exception& error) {
        // That one is turned away: the others may still come.
        LOG(ERROR) << "bagua: cannot take a connection: " << error.what();
      }
    }
  }
  void onWritable() override {}

 private:
  void letIn(Transport& transport, FileDescriptor accepted) {
    configure(accepted);
    const int number = accepted.number();
    auto encrypted = transport.encryption_ ? transport.encryption_->accept(number) : nullptr;
    const auto guest = std::make_shared<Guest>(transport_, Stream(std::move(accepted), std::move(encrypted)));
    transport.guestLoop_->add(number, guest, false);
    guests_.push_back(guest);
  }

  // A part of the files that this process may have open.
  static size_t mostGuests() {
    rlimit files{};
    if (getrlimit(RLIMIT_NOFILE, &files) != 0) return kFewestGuests;
    return std::clamp<size_t>(files.rlim_cur / 4, kFewestGuests, kMostGuests);
  }

  // Where there is none, whoever is here the longest and has shown nothing has had the best chance to.
  void makeRoom(Transport& transport) {
    std::erase_if(guests_, [&](const auto& guest) { return guest->isLate() && sendAway(*guest, transport); });
    if (guests_.size() < mostGuests_) return;
    auto leaving = std::find_if(guests_.begin(), guests_.end(),
                                [&](const auto& guest) { return guest->isStranger() && sendAway(*guest, transport); });
    if (leaving == guests_.end()) leaving = guests_.begin();
    (*leaving)->leave(transport);
    guests_.erase(leaving);
  }

  // Whether the guest has gone: to its link, or because it has still not shown that it may be here. It may be this
  // process that is late, and what the guest has said lies in its socket: its peer may take it for a connection by now.
  static bool sendAway(Guest& guest, Transport& transport) {
    try {
      guest.onReadable();
    } catch (const std::exception& error) {
      LOG(ERROR) << "bagua: cannot take a connection: " << error.what();
      guest.leave(transport);
    }
    if (guest.hasGone()) return true;
    if (!guest.isStranger() && guest.spare()) return false;
    guest.leave(transport);
    return true;
  }

  const std::weak_ptr<Transport> transport_;
  const int socket_;
  const size_t mostGuests_;
  std::deque<std::shared_ptr<Guest>> guests_;
};

// Not of each, which would let a stranger fill a disk.
void Transport::noteRefusal(const Stream& stream) {
  const auto now = std::chrono::steady_clock::now();
  ++refused_;
  if (refusalTold_ && now - *refusalTold_ < kRefusalInterval) return;
  LOG(WARNING) << "bagua: refused a connection from " << peerOf(stream.socket()) << ": " << stream.error()
               << ". Refused so far: " << refused_;
  refusalTold_ = now;
}

std::shared_ptr<Transport> Transport::listenAt(const std::string& address, int mostConnections,
                                               std::shared_ptr<const Encryption> encryption) {
  return std::shared_ptr<Transport>(new Transport(address, mostConnections, std::move(encryption)));
}

Transport::Transport(const std::string& address, int mostConnections, std::shared_ptr<const Encryption> encryption)
    : mostConnections_(mostConnections),
      encryption_(std::move(encryption)),
      listening_(net::listenAt(SocketAddress(address, 0))),
      guestLoop_(encryption_ ? std::make_shared<EventLoop>() : loop_) {
  address_ = {{randomNumber(), randomNumber()}, addressOf(listening_)};
}

Transport::~Transport() {
  guestLoop_->stop();
  loop_->stop();
  for (const auto& [process, link] : links_) link->close("this rank has ended its connections");
}

void Transport::welcome(const Hello& hello, Stream stream) {
  const bool isForUs = hello.magic == Hello::kMagic && hello.version == kVersion && hello.to == address_.process;
  if (!isForUs) return;
  const auto link = linkTo({hello.from, {}});
  if (link->adopt(stream, hello.link)) return;
  // The peer has lost what we took for a connection, and has begun anew.
  link->close("Connection closed by peer");
  linkTo({hello.from, {}})->adopt(stream, hello.link);
}

// --- Links and groups ------------------------------------------------------------------------------------------------

std::shared_ptr<Link> Transport::makeLink(const ProcessAddress& peer) {
  const std::weak_ptr<Transport> weak = weak_from_this();
  Link::Receiver receiver;
  receiver.begin = [weak](const Frame& frame, const std::vector<uint8_t>& context,
                          const std::shared_ptr<Answers>& sender) -> std::shared_ptr<Incoming> {
    const auto transport = weak.lock();
    if (!transport) return nullptr;
    const auto inbox = transport->inboxOf(frame.group);
    if (inbox) return inbox->begin(frame, context, sender);
    auto unwanted = Incoming::unwanted();
    const auto unasked = std::make_shared<Unasked>(sender, frame.group);
    if (!unwanted->begin(frame, context, unasked)) return nullptr;
    unasked->tellCredit();
    return unwanted;
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
    // Dropped without the mutex. Groups that have used it keep it.
    std::shared_ptr<Link> lost;
    {
      const std::lock_guard<std::mutex> lock(transport->mutex_);
      const auto link = transport->links_.find(process);
      if (link != transport->links_.end() && link->second->isLost()) {
        lost = std::move(link->second);
        transport->links_.erase(link);
      }
      for (const auto& [id, group] : transport->groups_) {
        if (auto alive = group.lock()) groups.push_back(std::move(alive));
      }
    }
    for (const auto& group : groups) group->onLost(process, error);
  };
  return std::make_shared<Link>(loop_, address_.process, Link::Peer{peer.process, peer.address}, randomNumber(),
                                Link::Opening{mostConnections_, encryption_}, std::move(receiver));
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

std::shared_ptr<Group> Transport::join(uint64_t id, int rank, const std::vector<ProcessAddress>& ranks,
                                       const std::vector<int>& neighbours) {
  std::shared_ptr<Group> group;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& inbox = inboxes_[id];
    if (!inbox) inbox = std::make_shared<Inbox>();
    group = std::make_shared<Group>(shared_from_this(), id, rank, ranks, neighbours, inbox);
    groups_[id] = group;
    if (std::exchange(isAnswering_, true)) return group;
  }
  const int socket = listening_.number();
  guestLoop_->add(socket, std::make_shared<Listener>(shared_from_this(), socket), false);
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
             std::vector<int> neighbours, std::shared_ptr<Inbox> inbox)
    : transport_(std::move(transport)),
      id_(id),
      rank_(rank),
      ranks_(std::move(ranks)),
      neighbours_(std::move(neighbours)),
      inbox_(std::move(inbox)),
      links_(ranks_.size()) {}

Group::~Group() { transport_->leave(id_); }

std::shared_ptr<Link> Group::linkTo(int peer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& link = links_[static_cast<size_t>(peer)];
  if (link) return link;
  link = transport_->linkTo(ranks_[static_cast<size_t>(peer)]);
  if (std::find(neighbours_.begin(), neighbours_.end(), peer) != neighbours_.end()) link->shareMemory();
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
  outgoing->mostUnasked = message.mostUnasked;
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

}  // namespace bagua::net
