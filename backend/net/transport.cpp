// SPDX-License-Identifier: Apache-2.0
#include "backend/net/transport.h"

#include <c10/util/Exception.h>

#include <random>
#include <utility>

#include "backend/net/listener.h"

namespace bagua::net {
namespace {

uint64_t randomNumber() {
  std::random_device device;
  return (uint64_t{device()} << 32U) | device();
}

}  // namespace

std::shared_ptr<Transport> Transport::listenAt(const std::string& address, int mostConnections,
                                               std::shared_ptr<const Encryption> encryption,
                                               std::chrono::milliseconds patience) {
  return std::shared_ptr<Transport>(new Transport(address, {mostConnections, std::move(encryption), patience}));
}

Transport::Transport(const std::string& address, Link::Opening opening)
    : opening_(std::move(opening)),
      listening_(net::listenAt(SocketAddress(address, 0))),
      guestLoop_(opening_.encryption ? std::make_shared<EventLoop>() : loop_) {
  address_ = {{randomNumber(), randomNumber()}, addressOf(listening_)};
}

Transport::~Transport() {
  guestLoop_->stop();
  loop_->stop();
  for (const auto& [process, link] : links_) link->close("this rank has ended its connections");
}

std::shared_ptr<Group> Transport::join(uint64_t id, int rank, const std::vector<ProcessAddress>& ranks,
                                       const std::vector<int>& neighbours) {
  auto group = std::make_shared<Group>(shared_from_this(), id, rank, ranks, neighbours, table_.join(id));
  table_.add(id, group);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (std::exchange(isAnswering_, true)) return group;
  }
  const int socket = listening_.number();
  guestLoop_->add(socket, std::make_shared<Listener>(weak_from_this(), guestLoop_, socket), false);
  return group;
}

std::shared_ptr<Link> Transport::linkTo(const ProcessAddress& peer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& link = links_[peer.process];
  if (link && !link->isLost()) {
    if (peer.address.size() > 0) link->learnAddress(peer.address);
    return link;
  }
  link = std::make_shared<Link>(loop_, address_.process, Link::Peer{peer.process, peer.address}, randomNumber(),
                                opening_, weak_from_this());
  return link;
}

void Transport::welcome(const Hello& hello, Stream stream) {
  if (hello.magic != Hello::kMagic || hello.to != address_.process) return;
  const auto link = linkTo({hello.from, {}});
  if (link->adopt(stream, hello.link)) return;
  // The peer has lost what we took for a connection, and has begun anew.
  link->close("Connection closed by peer");
  linkTo({hello.from, {}})->adopt(stream, hello.link);
}

Delivery Transport::begin(const Frame& frame, const std::vector<uint8_t>& context,
                          const std::shared_ptr<FlowControl>& sender) {
  if (auto inbox = table_.inboxOf(frame.group)) return {inbox->begin(frame, context, sender), inbox};
  auto unwanted = Incoming::unwanted();
  const auto budget = std::make_shared<UnsolicitedBudget>(sender, frame.group);
  if (!unwanted->begin(frame, context, budget)) return {};
  budget->grantCredit();
  return {std::move(unwanted), nullptr};
}

void Transport::onLeave(const Frame& frame) {
  const auto inbox = table_.inboxOf(frame.group);
  if (!inbox) return;
  inbox->noteLeave(frame.key.source, frame.total,
                   c10::str("Connection closed by peer: rank ", frame.key.source, " has left the group"));
}

void Transport::onLost(const Link& link, const std::string& error) {
  // Destroyed without the mutex. Groups that have used it keep it.
  std::shared_ptr<Link> lost;
  const ProcessId process = link.peer();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto known = links_.find(process);
    if (known != links_.end() && known->second->isLost()) {
      lost = std::move(known->second);
      links_.erase(known);
    }
  }
  for (const auto& group : table_.groups()) group->onLost(link, process, error);
  // Groups that this process has not joined yet hear of it when they ask.
  for (const auto& inbox : table_.inboxes()) inbox->failAllOver(link, error);
}

void Transport::loseLinksForTest() {
  std::map<ProcessId, std::shared_ptr<Link>> links;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    links = links_;
  }
  for (const auto& [process, link] : links) link->close("reset");
}

}  // namespace bagua::net
