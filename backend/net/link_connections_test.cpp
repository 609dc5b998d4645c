// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tests/support/open_sockets.h"
#include "tests/support/two_transports.h"

namespace bagua::net {
namespace {

class LinkConnections : public TwoTransports {
 protected:
  // Sends as much as gives a link a second connection.
  [[nodiscard]] size_t connectionsAfterABacklog() {
    for (uint64_t stream = 1; stream <= 4; ++stream) EXPECT_TRUE(arrives(stream, pattern(32 << 20, stream)));
    const uint16_t port = second_->address().address.port();
    return connectedSockets([&](uint16_t own, uint16_t /*peer*/) { return own == port; }).size();
  }
};

TEST_F(LinkConnections, ABacklogOpensAnotherOne) { EXPECT_GT(connectionsAfterABacklog(), 1U); }

TEST_F(LinkConnections, OnlyTheFirstOneTakesOfTheLastQuarterOfAProcesssFiles) {
  ASSERT_TRUE(arrives(0, pattern(10, 1)));
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit few = before;
  few.rlim_cur = 256;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  std::vector<UnsharedFile> files;
  do {
    files.emplace_back(open("/dev/null", O_RDONLY | O_CLOEXEC));
    ASSERT_TRUE(files.back().isOpen());
  } while (files.back().number() < 192);
  EXPECT_EQ(connectionsAfterABacklog(), 1U);
  EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
}

}  // namespace
}  // namespace bagua::net
