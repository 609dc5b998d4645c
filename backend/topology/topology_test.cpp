// SPDX-License-Identifier: Apache-2.0
#include "backend/topology/topology.h"

#include <gtest/gtest.h>

#include <cstdlib>

namespace bagua {
namespace {

TEST(HostTopology, NumbersHostsByTheirLowestRank) {
  const HostTopology topology({"b", "a", "b", "c"});
  EXPECT_EQ(topology.hostCount(), 3);
  EXPECT_EQ(topology.hostOf(0), 0);
  EXPECT_EQ(topology.hostOf(1), 1);
  EXPECT_EQ(topology.hostOf(2), 0);
  EXPECT_EQ(topology.hostOf(3), 2);
}

TEST(HostTopology, CountsRanksOfUnevenHosts) {
  const HostTopology topology({"a", "b", "a", "a"});
  EXPECT_EQ(topology.ranksOf(0), (std::vector<int>{0, 2, 3}));
  EXPECT_EQ(topology.ranksOf(1), (std::vector<int>{1}));
  EXPECT_EQ(topology.localRank(3), 2);
  EXPECT_EQ(topology.maxRanksPerHost(), 3);
}

TEST(HostTopology, OneRankPerHostLeavesNothingLocal) {
  const auto topology = HostTopology::oneRankPerHost(12);
  EXPECT_EQ(topology.hostCount(), 12);
  EXPECT_EQ(topology.hostOf(11), 11);
  EXPECT_EQ(topology.maxRanksPerHost(), 1);
}

TEST(LocalHostId, IsStableAndOverriddenByTheEnvironment) {
  unsetenv("BAGUA_HOST_ID");
  const std::string found = localHostId();
  EXPECT_FALSE(found.empty());
  EXPECT_EQ(found, localHostId());
  setenv("BAGUA_HOST_ID", "rack-7", 1);
  EXPECT_EQ(localHostId(), "rack-7");
  unsetenv("BAGUA_HOST_ID");
}

}  // namespace
}  // namespace bagua
