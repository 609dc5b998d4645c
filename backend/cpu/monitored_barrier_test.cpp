// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/monitored_barrier.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "backend/net/transport.h"

namespace bagua {
namespace {

TEST(MonitoredBarrier, NamesAllThatHaveNotComeWhereItWaitsForAll) {
  constexpr int kRanks = 4;
  std::vector<std::shared_ptr<net::Transport>> transports;
  std::vector<net::ProcessAddress> addresses;
  for (int rank = 0; rank < kRanks; ++rank) {
    transports.push_back(net::Transport::listenAt("127.0.0.1", 1));
    addresses.push_back(transports.back()->address());
  }
  // The others belong to the group, and never call it.
  std::vector<std::shared_ptr<net::Group>> groups;
  for (int rank = 0; rank < kRanks; ++rank) groups.push_back(transports[rank]->join(7, rank, addresses));
  Messages messages(groups[0]);
  MonitoredBarrier barrier(&messages, 0, kRanks);
  std::string error;
  try {
    barrier.pass(0, std::chrono::milliseconds(30), /*waitAllRanks=*/true);
  } catch (const c10::Error& thrown) {
    error = thrown.what_without_backtrace();
  }
  EXPECT_NE(error.find("Ranks 1, 2, 3 failed to pass monitoredBarrier"), std::string::npos) << error;
}

}  // namespace
}  // namespace bagua
