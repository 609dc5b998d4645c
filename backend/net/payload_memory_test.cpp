// SPDX-License-Identifier: Apache-2.0
#include "backend/net/payload_memory.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <set>
#include <string>
#include <thread>

#include "tests/support/two_transports.h"

namespace bagua::net {
namespace {

using namespace std::chrono_literals;

// Names of this process's segments.
int segments() {
  const std::string prefix = "bagua-" + std::to_string(getpid()) + "-";
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    count += static_cast<int>(entry.path().filename().string().starts_with(prefix));
  }
  return count;
}

TEST_F(TwoTransports, SharedMemoryHasNoNameOnceBothSeeIt) {
  joinAs(8, {0, 1});
  const Bytes sent = pattern(1U << 20U, 3);
  Bytes received(sent.size());
  for (uint64_t stream = 0; stream < 3; ++stream) {
    const auto sending = groups_[0]->send(1, stream, 0, all(sent));
    const auto receiving = groups_[1]->receive(0, stream, 0, at(received));
    ASSERT_TRUE(comes(*signal_, [&] { return receiving->state().isComplete(); }));
    EXPECT_LE(segments(), stream == 0 ? 1 : 0);
    std::this_thread::sleep_for(20ms);
  }
  EXPECT_EQ(segments(), 0);
}

// Of peers that end and come again, as those of an elastic job do.
TEST_F(TwoTransports, MemorySharedWithAPeerThatIsGoneIsFreedThoughItsGroupStays) {
  const Bytes sent = pattern(1U << 20U, 3);
  const auto shared = [] {
    int files = 0;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code error;
      files += std::filesystem::read_symlink(entry.path(), error).string().starts_with("/dev/shm/") ? 1 : 0;
    }
    return files;
  };
  const int before = shared();
  std::vector<std::shared_ptr<Group>> kept;
  for (uint64_t life = 0; life < 20; ++life) {
    joinAs(100 + life, {0, 1});
    kept.push_back(groups_[0]);
    for (uint64_t stream = 0; stream < 3; ++stream) {
      Bytes received(sent.size());
      const auto sending = groups_[0]->send(1, stream, 0, all(sent));
      const auto receiving = groups_[1]->receive(0, stream, 0, at(received));
      ASSERT_TRUE(comes(*signal_, [&] { return receiving->state().isComplete(); }));
      ASSERT_EQ(received, sent);
    }
    // One that this process makes, and one that it opens as the peer.
    EXPECT_GT(shared(), before) << "in life " << life;
    Bytes never(1);
    const auto waiting = groups_[0]->receive(1, 9, 0, at(never));
    second_->loseLinksForTest();
    ASSERT_TRUE(comes(*signal_, [&] { return !waiting->state().error.empty(); }));
    groups_[1].reset();
    second_ = Transport::listenAt("127.0.0.1", 4);
  }
  EXPECT_EQ(shared(), before);
}

TEST(PayloadMemory, CellsThatTheReceiverHasReadAreFreeAndWhoWaitsIsToldOnce) {
  const auto own = PayloadMemory::make();
  ASSERT_TRUE(own);
  EXPECT_FALSE(own->isOpened());
  const auto peers = PayloadMemory::open(own->name());
  ASSERT_TRUE(peers);
  EXPECT_FALSE(PayloadMemory::open(own->name())) << "it has a name still";
  EXPECT_TRUE(own->isOpened());
  std::set<uint32_t> taken;
  for (uint32_t i = 0; i < kPayloadCells; ++i) taken.insert(own->take().value());
  EXPECT_EQ(taken.size(), kPayloadCells);
  own->cell(3)[kMostPayload - 1] = 7;
  EXPECT_EQ(peers->cell(3)[kMostPayload - 1], 7);
  EXPECT_FALSE(peers->release(0)) << "nobody waits yet";
  EXPECT_EQ(own->take(), 0);
  EXPECT_FALSE(own->take());
  int told = 0;
  for (uint32_t i = 0; i < kPayloadCells; ++i) told += static_cast<int>(peers->release(i));
  EXPECT_EQ(told, 1);
  EXPECT_TRUE(own->take());
}

TEST(PayloadMemory, AProcessMakesOnlySoMuchOfIt) {
  std::vector<std::shared_ptr<PayloadMemory>> made;
  while (auto memory = PayloadMemory::make()) made.push_back(std::move(memory));
  EXPECT_EQ(made.size(), 16);
  made.pop_back();
  EXPECT_TRUE(PayloadMemory::make());
}

TEST(PayloadMemory, AWordThatIsNoNameOpensNothing) {
  for (const auto* word : {"", "/", "/bagua-", "/bagua-../../etc/passwd", "/bagua-0123"}) {
    EXPECT_FALSE(PayloadMemory::open(word)) << word;
  }
}

}  // namespace
}  // namespace bagua::net
