// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "backend/net/inbox.h"

namespace bagua::net {

class Group;

// The groups of one process and their inboxes. Peers may send for a group before this process joins it, as it does with
// the group's first operation, and after it has left. Any thread may call.
class GroupTable {
 public:
  // A process may be about to join so many groups for which something has come. The one that has waited longest is
  // dropped when there are more.
  static constexpr size_t kMostUnjoined = 256;

  // Returns where frames for a group go; null: the group was left, and they are thrown away.
  std::shared_ptr<Inbox> inboxOf(uint64_t group);
  // Returns the inbox of a group that this process joins. Throws DistNetworkError where it has been dropped.
  std::shared_ptr<Inbox> join(uint64_t group);
  void add(uint64_t group, const std::shared_ptr<Group>& joined);
  // Returns the inbox of a group that this process has left, of which it has told over `links`, by their ids.
  std::shared_ptr<Inbox> leave(uint64_t group, std::vector<uint64_t> links);
  // This process will not join the group any more, if it has not yet. Returns the inbox; null where it has.
  std::shared_ptr<Inbox> abandon(uint64_t group);
  // Returns whether the peer is to hear over `link` that a group was left. That is so once.
  bool isToHear(uint64_t group, uint64_t link);

  [[nodiscard]] std::vector<std::shared_ptr<Group>> groups();
  // Null where this process has not joined it, or has left it.
  [[nodiscard]] std::shared_ptr<Group> find(uint64_t group);
  [[nodiscard]] std::vector<std::shared_ptr<Inbox>> inboxes();

 private:
  // Called under the mutex. The result is to be destroyed without it: messages that nobody has asked for give credit.
  [[nodiscard]] std::shared_ptr<Inbox> remove(uint64_t group, std::vector<uint64_t> links = {});

  std::mutex mutex_;
  std::map<uint64_t, std::shared_ptr<Inbox>> inboxes_;
  std::map<uint64_t, std::weak_ptr<Group>> groups_;
  // Groups that were not joined, in the order in which something came for them.
  std::deque<uint64_t> unjoined_;
  // Groups that were left not long ago, the links over which peers know of it, and the order in which they were left.
  std::unordered_map<uint64_t, std::vector<uint64_t>> left_;
  std::deque<uint64_t> leftInOrder_;
};

}  // namespace bagua::net
