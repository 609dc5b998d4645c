// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "tests/support/open_sockets.h"
#include "tests/support/two_transports.h"

namespace bagua::net {
namespace {

// The ends of the connections between the two processes, both of which are in this one.
size_t endsOfConnections(const std::vector<uint16_t>& ports) {
  return connectedSockets([&](uint16_t own, uint16_t peer) {
           return std::ranges::any_of(ports, [&](uint16_t port) { return port == own || port == peer; });
         })
      .size();
}

TEST_F(TwoTransports, OnlyTheFirstConnectionTakesOfTheLastQuarterOfTheFiles) {
  const std::vector<uint16_t> ports{first_->address().address.port(), second_->address().address.port()};
  ASSERT_TRUE(arrives(0, pattern(10, 1)));
  // Each of them may open the first one, the slower of them a while later.
  size_t ends = 0;
  while (ends != endsOfConnections(ports)) {
    ends = endsOfConnections(ports);
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
  }
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit few = before;
  few.rlim_cur = 256;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  std::vector<UnsharedFile> files;
  do {
    files.emplace_back(open("/dev/null", O_RDONLY | O_CLOEXEC));
  } while (files.back().isOpen() && files.back().number() < 192);
  EXPECT_TRUE(files.back().isOpen());
  // Such a backlog gives a link a second one.
  for (uint64_t stream = 1; stream <= 4; ++stream) EXPECT_TRUE(arrives(stream, pattern(32 << 20, stream)));
  EXPECT_EQ(endsOfConnections(ports), ends);
  EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
}

}  // namespace
}  // namespace bagua::net
