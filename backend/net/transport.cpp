// SPDX-License-Identifier: Apache-2.0
#include "backend/net/transport.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <random>
#include <thread>
#include <utility>

#include "backend/net/greeting.h"

namespace bagua::net {
namespace {

// A process that ends waits for its peers as long as more and more has come there, a slow line being no fault, and
// while a connection that has broken is opened again; else it waits for the shorter time.
constexpr std::chrono::seconds kLongestFinish{30};
constexpr std::chrono::seconds kFinishTime{1};
// The answer to a connection that is refused has so long to arrive.
constexpr std::chrono::seconds kRefusalTime{2};

// Never 0.
uint64_t randomNumber() {
  std::random_device device;
  return (uint64_t{device()} << 32U) | device() | 1U;
}

}  // namespace

std::shared_ptr<Transport> Transport::listenAt(const std::string& address, int mostConnections,
                                               std::shared_ptr<const Encryption> encryption,
                                               std::chrono::milliseconds patience, config::PortRange ports) {
  return std::shared_ptr<Transport>(
      new Transport(net::listenAt(address, ports), {mostConnections, std::move(encryption), patience}));
}

Transport::Transport(UnsharedFile listening, Link::Opening opening)
    : opening_(std::move(opening)),
      listening_(std::move(listening)),
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
    for (const auto& [process, address] : ranks) {
      addresses_[process] = address;
      if (const auto link = links_.find(process); link != links_.end()) link->second->learnAddress(address);
    }
  }
  answer();
  return group;
}

std::shared_ptr<Inbox> Transport::expect(uint64_t id) {
  answer();
  return table_.join(id);
}

void Transport::answer() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (isAnswering_) return;
  const int socket = listening_.number();
  guestLoop_->add(socket, std::make_shared<Listener>(weak_from_this(), guestLoop_, socket), false);
  isAnswering_ = true;
}

std::shared_ptr<Link> Transport::linkTo(const ProcessId& peer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& link = links_[peer];
  if (link && !link->isLost()) return link;
  const auto known = addresses_.find(peer);
  const auto address = known == addresses_.end() ? SocketAddress() : known->second;
  link = std::make_shared<Link>(loop_, address_.process, Link::Peer{peer, address}, randomNumber(), opening_,
                                weak_from_this());
  return link;
}

std::shared_ptr<Link> Transport::knownLink(const ProcessId& peer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto known = links_.find(peer);
  return known == links_.end() ? nullptr : known->second;
}

std::vector<std::shared_ptr<Link>> Transport::allLinks() {
  std::vector<std::shared_ptr<Link>> all;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [process, link] : links_) all.push_back(link);
  return all;
}

void Transport::welcome(const Hello& hello, Stream stream) {
  if (hello.magic != Hello::kMagic || hello.link == 0) return;
  if (hello.to != address_.process) return refuse(hello, std::move(stream));
  const bool isAgain = hello.peerLink != 0;
  const auto link = isAgain ? knownLink(hello.from) : linkTo(hello.from);
  if (!link || (isAgain && link->id() != hello.peerLink)) return refuse(hello, std::move(stream));
  if (link->adopt(stream, hello)) return;
  if (isAgain) return refuse(hello, std::move(stream));
  // The peer has lost what we took for a link, and has begun anew.
  link->close("Connection closed by peer");
  linkTo(hello.from)->adopt(stream, hello);
}

void Transport::refuse(const Hello& hello, Stream stream) {
  auto answer = answerOf({.from = address_.process, .to = hello.from, .connection = hello.connection});
  std::array<iovec, 1> parts{{{answer.data(), answer.size()}}};
  // If not all of it leaves, the other side asks again.
  if (stream.send(parts) < 0) return;
  shutdown(stream.number(), SHUT_WR);
  // What comes meanwhile would have the kernel take the answer back.
  guestLoop_->callLater(kRefusalTime, [kept = std::make_shared<Stream>(std::move(stream))] {});
}

void Transport::finish() {
  const auto links = allLinks();
  for (const auto& link : links) link->askPeer();
  const auto awaited = [&links] {
    uint64_t count = 0;
    for (const auto& link : links) count += link->awaited();
    return count;
  };
  const auto begin = std::chrono::steady_clock::now();
  auto progress = begin;
  for (uint64_t left = awaited(); left > 0;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const auto now = std::chrono::steady_clock::now();
    const uint64_t still = awaited();
    if (still < left || std::ranges::any_of(links, [](const auto& link) { return link->isBroken(); })) progress = now;
    if (now - progress >= kFinishTime || now - begin >= kLongestFinish) return;
    left = still;
  }
}

void Transport::halt() {
  loop_->halt();
  guestLoop_->halt();
}

void Transport::tellSenders(uint64_t group, const std::shared_ptr<Inbox>& inbox) {
  if (!inbox) return;
  for (const auto& link : allLinks()) {
    if (inbox->hasHeardFrom(*link)) tellSender(group, *link);
  }
}

void Transport::tellSender(uint64_t group, Link& link) {
  if (table_.isToHear(group, link.id())) link.tellAbsence(group);
}

Delivery Transport::begin(const Frame& frame, const std::vector<uint8_t>& context, const std::shared_ptr<Link>& link) {
  if (auto inbox = table_.inboxOf(frame.group)) {
    Delivery delivery{inbox->begin(frame, context, link), inbox};
    if (inbox->isClosed()) tellSender(frame.group, *link);
    return delivery;
  }
  tellSender(frame.group, *link);
  auto unwanted = Incoming::unwanted();
  const auto budget = std::make_shared<UnsolicitedBudget>(link, frame.group);
  if (!unwanted->begin(frame, context, budget)) return {};
  budget->grantCredit();
  return {std::move(unwanted), nullptr};
}

void Transport::onAskForLeave(const Frame& frame, Link& link) {
  const auto inbox = table_.inboxOf(frame.group);
  if (inbox) inbox->noteAsking(frame.key.source, link);
  if (!inbox || inbox->isClosed()) return tellSender(frame.group, link);
  if (const auto joined = table_.find(frame.group)) joined->onAskForLeave(frame.key.source);
}

void Transport::onLeave(const Frame& frame) {
  const auto inbox = table_.inboxOf(frame.group);
  if (!inbox) return;
  inbox->noteLeave(frame.key.source, frame.total, Group::leaveOf(frame.key.source));
}

void Transport::onAbsent(const Link& link, uint64_t group) {
  if (const auto joined = table_.find(group)) joined->onAbsent(link.peer());
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
  for (const auto& link : allLinks()) link->close("reset");
}

}  // namespace bagua::net
