// SPDX-License-Identifier: Apache-2.0
#include "backend/topology/host_lanes.h"

#include <gtest/gtest.h>

#include <numeric>

namespace bagua {
namespace {

using Hosts = std::vector<std::string>;

class HostLanesOn : public ::testing::TestWithParam<Hosts> {};

TEST_P(HostLanesOn, EveryElementHasOneOwnerOnEveryHost) {
  const HostTopology topology(GetParam());
  constexpr int64_t kLength = 1001;
  for (int host = 0; host < topology.hostCount(); ++host) {
    std::vector<int> owners(kLength, 0);
    for (const int rank : topology.ranksOf(host)) {
      const HostLanes lanes(topology, rank, kLength);
      for (int lane = lanes.firstLane(rank); lane < lanes.endLane(rank); ++lane) {
        EXPECT_EQ(lanes.owner(host, lane), rank);
        for (int64_t i = lanes.begin(lane); i < lanes.begin(lane) + lanes.length(lane); ++i) ++owners[i];
      }
    }
    EXPECT_EQ(owners, std::vector<int>(kLength, 1));
  }
}

TEST_P(HostLanesOn, PartsOfTheRanksOfAHostAreTheirLanesInOrder) {
  const HostTopology topology(GetParam());
  for (int rank = 0; rank < topology.size(); ++rank) {
    const HostLanes lanes(topology, rank, 77);
    const auto parts = lanes.partsInHost();
    const auto own = parts.begin() + topology.localRank(rank);
    EXPECT_EQ(std::accumulate(parts.begin(), own, int64_t{0}), lanes.begin(lanes.firstLane(rank)));
    EXPECT_EQ(*own, lanes.ownLength(rank));
    EXPECT_EQ(std::accumulate(own, parts.end(), int64_t{0}), 77 - lanes.begin(lanes.firstLane(rank)));
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, HostLanesOn,
                         ::testing::Values(Hosts{"a"}, Hosts{"a", "b"}, Hosts{"a", "a", "b", "b"},
                                           Hosts{"a", "a", "a", "b"}, Hosts{"a", "b", "b", "a"},
                                           Hosts{"a", "b", "b", "c", "c", "c", "c", "c"}));

TEST(HostLanes, MoreLanesThanElementsLeavesTheLastOnesEmpty) {
  const HostTopology topology(Hosts{"a", "a", "a", "a"});
  const HostLanes lanes(topology, 0, 2);
  EXPECT_EQ(lanes.count(), 4);
  EXPECT_EQ(lanes.length(0), 1);
  EXPECT_EQ(lanes.length(1), 1);
  EXPECT_EQ(lanes.length(2), 0);
  EXPECT_EQ(lanes.length(3), 0);
}

}  // namespace
}  // namespace bagua
