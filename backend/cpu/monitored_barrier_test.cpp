// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/monitored_barrier.h"

#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "backend/net/transport.h"
#include "tests/support/thrown_messages.h"

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
  const auto error = testing::messageThrownBy<c10::Error>(
      [&] { barrier.pass(0, std::chrono::milliseconds(30), /*waitAllRanks=*/true); });
  EXPECT_THAT(error, ::testing::HasSubstr("Ranks 1, 2, 3 failed to pass monitoredBarrier"));
}

}  // namespace
}  // namespace bagua
