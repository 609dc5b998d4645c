// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/socket_wire.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <thread>

namespace bagua {
namespace {

// Some ranks, each on a thread of its own with a transport of its own, as in a process of its own.
class SocketWireTest : public ::testing::Test {
 protected:
  static constexpr int kRanks = 3;

  static void runRanks(const std::function<void(SocketWire& wire, net::Group& group)>& body) {
    std::vector<std::shared_ptr<net::Transport>> transports;
    std::vector<net::ProcessAddress> addresses;
    for (int rank = 0; rank < kRanks; ++rank) {
      transports.push_back(net::Transport::listenAt("127.0.0.1", 2));
      addresses.push_back(transports.back()->address());
    }
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < kRanks; ++rank) {
      ranks.emplace_back([&, rank] {
        const auto group = transports[rank]->join(7, rank, addresses);
        SocketWire wire(group);
        body(wire, *group);
      });
    }
    for (auto& rank : ranks) rank.join();
  }

  static Wire::Deadline soon() { return std::chrono::steady_clock::now() + std::chrono::seconds(60); }
  static ProgramFingerprint program(uint64_t sequence) {
    ProgramFingerprint program;
    program.sequence = sequence;
    return program;
  }
};

// What comes last may come at any moment between two looks of the rank that waits for it: often enough, it comes at
// each of them.
TEST_F(SocketWireTest, AllThatHasComeIsUsedBeforeAnExchangeEnds) {
  constexpr int kPrograms = 10'000;
  constexpr int64_t kBytes = 700;
  runRanks([](SocketWire& wire, net::Group&) {
    int64_t unused = 0;
    for (int sequence = 0; sequence < kPrograms; ++sequence) {
      wire.setProgram(program(sequence));
      const at::Tensor sent = at::full({kBytes}, wire.rank(), at::kByte);
      Wire::Exchanges exchanges;
      for (int step = 1; step < kRanks; ++step) {
        exchanges.push_back({(wire.rank() + step) % kRanks, sent, at::empty({kBytes}, at::kByte)});
      }
      int64_t used = 0;
      const auto use = [&](int64_t begin, int64_t end) { used += end - begin; };
      wire.exchangeInPieces(exchanges, {.beforeSending = {}, .afterReceiving = use}, {}, soon());
      unused += kBytes - used;
    }
    EXPECT_EQ(unused, 0) << "bytes on rank " << wire.rank();
  });
}

TEST_F(SocketWireTest, AByteIsOnItsWayForHalfARoundTrip) {
  runRanks([](SocketWire& wire, net::Group& group) {
    wire.setProgram(program(0));
    const int peer = (wire.rank() + 1) % kRanks;
    wire.tellEach({peer, (wire.rank() + 2) % kRanks}, at::full({1}, 1, at::kByte), soon());
    net::Line line;
    Wire::Line seen;
    // The kernel may see a shorter round trip in between.
    do {
      line = group.lineTo(peer);
      seen = wire.lineTo(peer);
    } while (group.lineTo(peer).roundTrip != line.roundTrip);
    if (line.roundTrip.count() == 0) GTEST_SKIP() << "this kernel tells nothing of a line";
    EXPECT_EQ(seen.delay, line.roundTrip / 2);
  });
}

}  // namespace
}  // namespace bagua
