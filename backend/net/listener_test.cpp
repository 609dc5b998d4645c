// SPDX-License-Identifier: Apache-2.0
#include "backend/net/listener.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <optional>
#include <string>

#include "tests/support/open_sockets.h"

namespace bagua::net {
namespace {

const char* const kHere = "127.0.0.1";

uint16_t portOf(const UnsharedFile& socket) { return addressOf(socket).port(); }

std::string refusalOf(config::PortRange ports) {
  try {
    listenAt(kHere, ports);
  } catch (const c10::DistNetworkError& error) {
    return error.what_without_backtrace();
  }
  return "";
}

TEST(Ports, EachProcessTakesTheFirstFreeOne) {
  const auto range = freePorts();
  std::optional<UnsharedFile> first = listenAt(kHere, range);
  const UnsharedFile second = listenAt(kHere, range);
  EXPECT_EQ(portOf(*first), range.first);
  EXPECT_EQ(portOf(second), range.last);
  EXPECT_NE(refusalOf(range).find("all ports of BAGUA_PORT=" + std::to_string(range.first) + "-" +
                                  std::to_string(range.last) + " are taken"),
            std::string::npos);
  first.reset();
  EXPECT_EQ(portOf(listenAt(kHere, range)), range.first);
}

TEST(Ports, AreAnyOnesWhereNoneIsNamed) {
  const UnsharedFile first = listenAt(kHere);
  const UnsharedFile second = listenAt(kHere);
  EXPECT_NE(portOf(first), portOf(second));
}

// The kernel keeps the connection that this side has closed first.
TEST(Ports, AreFreeAsSoonAsTheProcessThatListenedHasEnded) {
  const auto range = freePorts();
  {
    const UnsharedFile listening = listenAt(kHere, {range.first, range.first});
    int error = 0;
    const UnsharedFile client = startConnecting(addressOf(listening), error);
    pollfd comes{.fd = listening.number(), .events = POLLIN, .revents = 0};
    ASSERT_EQ(poll(&comes, 1, 10'000), 1);
    const UnsharedFile accepted(accept(listening.number(), nullptr, nullptr));
    ASSERT_TRUE(accepted.isOpen());
    shutdown(accepted.number(), SHUT_WR);
    pollfd ends{.fd = client.number(), .events = POLLIN, .revents = 0};
    ASSERT_EQ(poll(&ends, 1, 10'000), 1);
  }
  EXPECT_EQ(refusalOf({range.first, range.first}), "");
}

}  // namespace
}  // namespace bagua::net
