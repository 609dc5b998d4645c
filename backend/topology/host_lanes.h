// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "backend/communicator.h"
#include "backend/topology/topology.h"

namespace bagua {

// How the ranks of several hosts share one flat tensor, so that every rank takes part in the exchange between hosts.
//
// The tensor is cut into lanes, as many as the fullest host has ranks. On every host each lane has one owner (a host
// with fewer ranks gives several neighbouring lanes to one rank). A hierarchical reduction then is: (1) inside a host
// every rank hands each lane to its owner, who adds them up; (2) between hosts the owners of the same lane reduce it;
// (3) inside a host the owners hand the result to everybody. With one rank per host there is one lane and (1) and (3)
// vanish.
class HostLanes {
 public:
  HostLanes(const HostTopology& topology, int rank, int64_t length);

  [[nodiscard]] int count() const { return lanes_; }
  [[nodiscard]] int hostCount() const { return topology_.hostCount(); }
  [[nodiscard]] int ownHost() const { return topology_.hostOf(rank_); }
  // Lane `lane` holds the elements [begin(lane), begin(lane + 1)); the last ones may be shorter or empty.
  [[nodiscard]] int64_t begin(int lane) const { return std::min<int64_t>(lane * laneLength_, length_); }
  [[nodiscard]] int64_t length(int lane) const { return begin(lane + 1) - begin(lane); }
  [[nodiscard]] int owner(int host, int lane) const;
  // One per host.
  [[nodiscard]] std::vector<int> owners(int lane) const;
  // Lanes that `rank` owns on its host: [firstLane(rank), endLane(rank)).
  [[nodiscard]] int firstLane(int rank) const;
  [[nodiscard]] int endLane(int rank) const;
  // Elements of all lanes that `rank` owns.
  [[nodiscard]] int64_t ownLength(int rank) const { return begin(endLane(rank)) - begin(firstLane(rank)); }

  // Whether every rank owns exactly one lane.
  [[nodiscard]] bool isEven() const { return lanes_ * hostCount() == topology_.size(); }
  // Number of ranks on this rank's host.
  [[nodiscard]] int localSize() const;
  // Elements that each rank of this rank's host owns, see Communicator::reduceScatterInHost().
  [[nodiscard]] Communicator::Splits partsInHost() const;

 private:
  const HostTopology& topology_;
  const int rank_;
  const int64_t length_;
  const int lanes_;
  const int64_t laneLength_;
};

}  // namespace bagua
