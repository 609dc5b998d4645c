// SPDX-License-Identifier: Apache-2.0
#include "backend/net/group_table.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace bagua::net {
namespace {

// So many groups that were left are remembered.
constexpr size_t kMostLeft = 4096;

}  // namespace

std::shared_ptr<Inbox> GroupTable::inboxOf(uint64_t group) {
  // Destroyed last, without the mutex.
  std::shared_ptr<Inbox> dropped;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (left_.contains(group)) return nullptr;
  auto& inbox = inboxes_[group];
  if (inbox) return inbox;
  inbox = std::make_shared<Inbox>();
  auto result = inbox;
  unjoined_.push_back(group);
  if (unjoined_.size() > kMostUnjoined) dropped = remove(unjoined_.front());
  return result;
}

std::shared_ptr<Inbox> GroupTable::join(uint64_t group) {
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK_WITH(DistNetworkError, !left_.contains(group),
                   "bagua: a group cannot be joined: it was left before, or peers have sent for more than ",
                   kMostUnjoined, " groups that this rank had not used, and what came for this one was dropped");
  std::erase(unjoined_, group);
  auto& inbox = inboxes_[group];
  if (!inbox) inbox = std::make_shared<Inbox>();
  return inbox;
}

void GroupTable::add(uint64_t group, const std::shared_ptr<Group>& joined) {
  const std::lock_guard<std::mutex> lock(mutex_);
  groups_[group] = joined;
}

std::shared_ptr<Inbox> GroupTable::remove(uint64_t group, std::vector<uint64_t> links) {
  std::erase(unjoined_, group);
  groups_.erase(group);
  if (left_.emplace(group, std::move(links)).second) leftInOrder_.push_back(group);
  if (leftInOrder_.size() > kMostLeft) {
    left_.erase(leftInOrder_.front());
    leftInOrder_.pop_front();
  }
  const auto found = inboxes_.find(group);
  if (found == inboxes_.end()) return nullptr;
  auto inbox = std::move(found->second);
  inboxes_.erase(found);
  inbox->close();
  return inbox;
}

std::shared_ptr<Inbox> GroupTable::leave(uint64_t group, std::vector<uint64_t> links) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return remove(group, std::move(links));
}

std::shared_ptr<Inbox> GroupTable::abandon(uint64_t group) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return groups_.contains(group) ? nullptr : remove(group);
}

bool GroupTable::isToHear(uint64_t group, uint64_t link) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto left = left_.find(group);
  if (left == left_.end() || std::ranges::find(left->second, link) != left->second.end()) return false;
  left->second.push_back(link);
  return true;
}

std::shared_ptr<Group> GroupTable::find(uint64_t group) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto joined = groups_.find(group);
  return joined == groups_.end() ? nullptr : joined->second.lock();
}

std::vector<std::shared_ptr<Group>> GroupTable::groups() {
  std::vector<std::shared_ptr<Group>> alive;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [id, group] : groups_) {
    if (auto joined = group.lock()) alive.push_back(std::move(joined));
  }
  return alive;
}

std::vector<std::shared_ptr<Inbox>> GroupTable::inboxes() {
  std::vector<std::shared_ptr<Inbox>> all;
  const std::lock_guard<std::mutex> lock(mutex_);
  all.reserve(inboxes_.size());
  for (const auto& [id, inbox] : inboxes_) all.push_back(inbox);
  return all;
}

}  // namespace bagua::net
