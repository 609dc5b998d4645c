// SPDX-License-Identifier: Apache-2.0
#include "backend/net/group.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <utility>

#include "backend/net/transport.h"

namespace bagua::net {

Group::Group(std::shared_ptr<Transport> transport, uint64_t id, int rank, std::vector<ProcessAddress> ranks,
             std::vector<int> neighbours, std::shared_ptr<Inbox> inbox)
    : transport_(std::move(transport)),
      id_(id),
      rank_(rank),
      ranks_(std::move(ranks)),
      neighbours_(std::move(neighbours)),
      inbox_(std::move(inbox)),
      links_(ranks_.size()) {}

Group::~Group() {
  std::vector<uint64_t> links;
  for (const auto& link : links_) {
    if (link) links.push_back(link->id());
  }
  transport_->leave(id_, std::move(links));
}

std::shared_ptr<Link> Group::linkTo(int peer) {
  std::shared_ptr<Link> link;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& known = links_[static_cast<size_t>(peer)];
    if (known) return known;
    known = link = transport_->linkTo(ranks_[static_cast<size_t>(peer)].process);
    if (std::ranges::find(neighbours_, peer) != neighbours_.end()) link->shareMemory();
    if (!hasLeft_) return link;
  }
  // The mutex is free here: the link may be found lost, of which this group hears.
  link->leave(id_, static_cast<uint32_t>(rank_));
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
  static_cast<Message&>(*outgoing) = std::move(message);
  outgoing->group = id_;
  outgoing->key = {stream, static_cast<uint32_t>(rank_), index};
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
  // A place is worth a message only if it is of some size.
  const bool isWorthTelling = place == size_ || place - granted_ >= room_ / 8;
  if (place <= granted_ || !isWorthTelling) return;
  granted_ = place;
  link_->grantPlace(group_, key_, place);
}

void Group::leave() {
  std::vector<std::shared_ptr<Link>> links;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (std::exchange(hasLeft_, true)) return;
    links = links_;
  }
  for (size_t peer = 0; peer < links.size(); ++peer) {
    if (links[peer]) {
      links[peer]->leave(id_, static_cast<uint32_t>(rank_));
    } else if (const auto link = transport_->knownLink(ranks_[peer].process);
               link && !link->isLost() && inbox_->hasHeardFrom(*link)) {
      linkTo(static_cast<int>(peer));  // This tells of the leave.
    }
  }
}

void Group::watchLeave(int peer) {
  const auto link = linkTo(peer);
  link->connect();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!asked_.insert(peer).second) return;
  }
  link->askForLeave(id_, static_cast<uint32_t>(rank_));
}

void Group::onAskForLeave(uint32_t peer) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!hasLeft_ || peer >= ranks_.size()) return;
  }
  linkTo(static_cast<int>(peer));  // This tells of the leave.
}

void Group::onAbsent(const ProcessId& process) {
  for (uint32_t peer = 0; peer < ranks_.size(); ++peer) {
    if (ranks_[peer].process == process) inbox_->noteLeave(peer, 0, leaveOf(peer));
  }
}

std::string Group::leaveOf(uint32_t rank) {
  return c10::str("Connection closed by peer: rank ", rank, " has left the group");
}

void Group::onLost(const Link& link, const ProcessId& process, const std::string& error) {
  for (size_t peer = 0; peer < ranks_.size(); ++peer) {
    if (ranks_[peer].process != process || static_cast<int>(peer) == rank_) continue;
    const auto source = static_cast<uint32_t>(peer);
    std::shared_ptr<Link> used;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      used = links_[peer];
    }
    if (used.get() != &link && !inbox_->uses(link, source, /*hasAnother=*/used != nullptr)) continue;
    if (link.hasPeerDied()) {
      const std::lock_guard<std::mutex> lock(mutex_);
      died_.insert(static_cast<int>(peer));
    }
    const std::string text = c10::str(error, " (rank ", peer, " at ", ranks_[peer].address.address(), ")");
    const bool hadLeft = !inbox_->errorOf(source).empty();
    inbox_->failAllOf(source, text);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!hadLeft && !hasLeft_ && links_[peer] && !lost_) lost_ = text;
  }
}

bool Group::hasDied(int peer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  // The link's error is seen a moment before the group hears of it.
  const auto& link = links_[static_cast<size_t>(peer)];
  return died_.contains(peer) || (link && link->isLost() && link->hasPeerDied());
}

std::optional<std::string> Group::findLost() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return lost_;
}

}  // namespace bagua::net
