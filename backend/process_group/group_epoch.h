// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "backend/health/group_health.h"
#include "backend/message_executor.h"
#include "backend/os/process_mark.h"
#include "backend/process_group/group_options.h"
#include "backend/rendezvous/rank_record.h"

namespace bagua {

// One membership of a group, from the meeting of its ranks to the next change of who they are: its store, the topology
// of its hosts, its executors with their connections, and what watches over them. All of it is named by an id that the
// ranks have drawn when they met, so that nothing of one epoch is taken for another's; and all of it ends with the
// epoch. A group that is never reconfigured has one epoch. Safe to call from several threads.
class GroupEpoch {
 public:
  using StorePtr = c10::intrusive_ptr<c10d::Store>;
  using Executors =
      std::map<at::Device, std::shared_ptr<MessageExecutor>, bool (*)(const at::Device&, const at::Device&)>;

  // `members` have met in `store`, in which nothing is left of another meeting.
  // `options` are the group's, of all its epochs: what changes there counts here. `globalRanks` are for messages.
  // `survivesDeaths`: see GroupHealth.
  GroupEpoch(StorePtr store, GroupMembers members, GroupIdentity identity, c10::intrusive_ptr<GroupOptions> options,
             std::vector<uint64_t> globalRanks, bool survivesDeaths);
  // In a forked child it leaves the parent's epoch alone.
  ~GroupEpoch();
  GroupEpoch(const GroupEpoch&) = delete;
  GroupEpoch& operator=(const GroupEpoch&) = delete;

  [[nodiscard]] GroupIdentity identity() const;
  // torch names a group after it was made.
  void rename(const std::string& name);
  [[nodiscard]] std::shared_ptr<const HostTopology> topology() const { return topology_; }
  [[nodiscard]] const StorePtr& store() const { return store_; }
  // The same on all ranks, and no other epoch's.
  [[nodiscard]] uint64_t id() const { return members_.id; }

  // The first call for a device makes its executor. Throws DistBackendError once the epoch has ended.
  std::shared_ptr<MessageExecutor> executorFor(at::Device device);
  // A copy: they are called without the mutex.
  [[nodiscard]] Executors executors() const;
  // Operations between the two calls are one unit, on one device. endCoalescing() returns null where there were none,
  // or they were dropped, and throws where nothing was started.
  void startCoalescing();
  c10::intrusive_ptr<c10d::Work> endCoalescing();
  // Forgets those operations where one was refused: torch's batch_isend_irecv then ends no coalescing, and later ones
  // would be part of it. Does nothing where there is none.
  void dropCoalescing();

  // Whether an operation has failed; not that it was aborted.
  [[nodiscard]] bool hasFailed() const;
  // Fails everything in flight, and whatever comes later: `how` says why, "was aborted".
  void abort(const std::string& how);
  // Lets what is in flight end, for a short while, and refuses whatever comes later.
  void shutdown();

 private:
  enum class Coalescing { kNone, kOpen, kDropped };

  std::shared_ptr<MessageExecutor> makeExecutor(at::Device device);
  // Under the mutex. Returns the executor with operations that are coalesced, or null, and leaves it to the caller.
  std::shared_ptr<MessageExecutor> closeCoalescing(Coalescing state);
  // Under the mutex.
  GroupHealth& health();
  void close(const std::string& how);
  void stopHealth();

  const ProcessMark mark_;
  const StorePtr store_;
  const c10::intrusive_ptr<GroupOptions> options_;
  const std::vector<uint64_t> globalRanks_;
  const bool survivesDeaths_;
  const GroupMembers members_;
  const std::shared_ptr<const HostTopology> topology_;

  mutable std::mutex mutex_;
  GroupIdentity identity_;
  // Made when it is first needed; outlives all executors.
  std::unique_ptr<GroupHealth> health_;
  Executors executors_;
  // Why no operation is accepted any more; empty while the epoch is open.
  std::string closed_;
  // What hasFailed() says from then on.
  bool hadFailed_ = false;
  Coalescing coalescing_ = Coalescing::kNone;
  std::optional<at::Device> coalescedDevice_;
};

}  // namespace bagua
