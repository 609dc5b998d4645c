// SPDX-License-Identifier: Apache-2.0
// Messages over the plugin arrive, whatever their sizes, their order and the number of connections.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <random>

#include "tests/support/nccl_plugin.h"

namespace bagua::nccl_net {
namespace {

// Of NCCL 2.28.9, as its own headers have it on x86-64 and aarch64.
static_assert(sizeof(PropertiesV10) == 104 && offsetof(PropertiesV10, speed) == 36 &&
              offsetof(PropertiesV10, virtualDevice) == 64 && offsetof(PropertiesV10, maxP2pBytes) == 88);
static_assert(sizeof(PropertiesV11) == 112 && offsetof(PropertiesV11, maxMultiRequestSize) == 104);
static_assert(sizeof(NetV10) == 20 * sizeof(void*) && offsetof(NetV10, transfer) == 6 * sizeof(void*));
static_assert(sizeof(NetV11) == 22 * sizeof(void*) && offsetof(NetV11, finalize) == 20 * sizeof(void*));

TEST_F(NcclNet, TellsNcclToStageInHostMemory) {
  int count = 0;
  ASSERT_EQ(plugin().devices(&count), Result::kSuccess);
  EXPECT_EQ(count, 1);
  PropertiesV11 properties;
  std::memset(&properties, 0xEE, sizeof(properties));
  ASSERT_EQ(plugin().getProperties(0, &properties), Result::kSuccess);
  EXPECT_EQ(properties.common.ptrSupport, kPtrHost);
  EXPECT_GT(properties.common.speed, 0);
  EXPECT_EQ(properties.common.latency, 0);
  EXPECT_EQ(properties.common.netDeviceType, 0);
  EXPECT_EQ(properties.common.virtualDevice.count, 1);
  EXPECT_EQ(properties.common.virtualDevice.devices[0], 0);
  EXPECT_EQ(properties.common.maxP2pBytes, size_t{1} << 40U);
  EXPECT_EQ(properties.maxMultiRequestSize, 1);
  EXPECT_STREQ(plugin().name, "bagua");
  void* registration = nullptr;
  constexpr int kPtrCuda = 2;
  const Ends ends = connect();
  EXPECT_NE(transfer().regMr(ends.sending, this, 1, kPtrCuda, &registration), Result::kSuccess);
  close(ends);
}

TEST_F(NcclNet, MessagesOfAllSizesArriveInOrder) {
  const Ends ends = connect();
  const size_t sizes[] = {0, 1, 7, 4096, 70'000, 1 << 20, (5 << 20) + 3, 36 << 20};
  for (const bool isExpected : {true, false}) {
    std::vector<Bytes> sent;
    std::vector<Bytes> received;
    std::vector<void*> sends;
    std::vector<void*> receives;
    for (const size_t size : sizes) {
      sent.push_back(pattern(size, static_cast<uint8_t>(size % 251)));
      // NCCL does not know how much will come.
      received.emplace_back(size + size / 3 + 10, uint8_t{0xEE});
    }
    if (isExpected) {
      for (auto& place : received) receives.push_back(receive(ends.receiving, place));
    }
    for (const auto& bytes : sent) sends.push_back(send(ends.sending, bytes));
    if (!isExpected) {
      for (auto& place : received) receives.push_back(receive(ends.receiving, place));
    }
    for (size_t i = 0; i < std::size(sizes); ++i) {
      int size = -1;
      ASSERT_EQ(finish(receives[i], &size), Result::kSuccess);
      EXPECT_EQ(static_cast<size_t>(size), sizes[i]);
      EXPECT_TRUE(std::equal(sent[i].begin(), sent[i].end(), received[i].begin())) << sizes[i] << " bytes";
      EXPECT_EQ(std::count(received[i].begin() + static_cast<long>(sizes[i]), received[i].end(), 0xEE),
                static_cast<long>(received[i].size() - sizes[i]));
      ASSERT_EQ(finish(sends[i], &size), Result::kSuccess);
      EXPECT_EQ(static_cast<size_t>(size), sizes[i]);
    }
  }
  close(ends);
}

TEST_F(NcclNet, WhatIsSentMayBeOverwrittenWhenItsRequestIsComplete) {
  const Ends ends = connect();
  for (int round = 0; round < 50; ++round) {
    const Bytes expected = pattern(300'000, static_cast<uint8_t>(round));
    Bytes sent = expected;
    ASSERT_EQ(finish(send(ends.sending, sent)), Result::kSuccess);
    std::fill(sent.begin(), sent.end(), 0xEE);
    Bytes received(expected.size());
    ASSERT_EQ(finish(receive(ends.receiving, received)), Result::kSuccess);
    ASSERT_TRUE(received == expected) << "round " << round;
  }
  close(ends);
}

TEST_F(NcclNet, AGroupOfReceivesTakesItsMessagesByTheirTags) {
  const Ends ends = connect();
  for (int round = 0; round < 20; ++round) {
    constexpr int kCount = 8;
    std::vector<Bytes> places(kCount, Bytes(100'000));
    std::vector<void*> data(kCount);
    std::vector<size_t> most(kCount);
    std::vector<int> tags(kCount);
    std::vector<int> order(kCount);
    for (int i = 0; i < kCount; ++i) {
      data[i] = places[i].data();
      most[i] = places[i].size();
      tags[i] = 100 + i;
      order[i] = i;
    }
    std::shuffle(order.begin(), order.end(), std::minstd_rand(round));
    void* group = nullptr;
    ASSERT_EQ(transfer().irecv(ends.receiving, kCount, data.data(), most.data(), tags.data(), nullptr, nullptr, &group),
              Result::kSuccess);
    std::vector<Bytes> sent;
    for (int i = 0; i < kCount; ++i) sent.push_back(pattern(10'000 * i + round, static_cast<uint8_t>(i + round)));
    std::vector<void*> sends;
    for (const int i : order) {
      int isDone = -1;
      ASSERT_EQ(transfer().test(group, &isDone, nullptr), Result::kSuccess);
      EXPECT_EQ(isDone, 0);
      sends.push_back(send(ends.sending, sent[i], tags[i]));
    }
    std::vector<int> sizes(kCount, -1);
    ASSERT_EQ(finish(group, sizes.data()), Result::kSuccess);
    for (int i = 0; i < kCount; ++i) {
      ASSERT_EQ(static_cast<size_t>(sizes[i]), sent[i].size());
      EXPECT_TRUE(std::equal(sent[i].begin(), sent[i].end(), places[i].begin()));
      EXPECT_EQ(finish(sends[i]), Result::kSuccess);
    }
  }
  close(ends);
}

TEST_F(NcclNet, ARequestThatThereIsNoRoomForIsNotBegun) {
  const Ends ends = connect();
  Bytes place(1);
  std::vector<void*> receives;
  while (void* const request = receive(ends.receiving, place)) {
    receives.push_back(request);
    ASSERT_LT(receives.size(), 10'000U);
  }
  // NCCL has so many under way for each receive of a group.
  EXPECT_EQ(receives.size(), 32U * 8U);
  const Bytes sent = pattern(1, 42);
  ASSERT_EQ(finish(send(ends.sending, sent)), Result::kSuccess);
  ASSERT_EQ(finish(receives.front()), Result::kSuccess);
  EXPECT_EQ(place, sent);
  EXPECT_NE(receive(ends.receiving, place), nullptr);
  close(ends);
}

// As between the ranks of several communicators with several channels each: every pair in both directions.
TEST_F(NcclNet, ManyConnectionsOfManyCommunicatorsWorkAtOnce) {
  constexpr int kRanks = 4;
  constexpr int kChannels = 8;
  struct Way {
    Ends ends;
    Bytes sent = {};
    Bytes received = {};
    void* send = nullptr;
    void* receive = nullptr;
  };
  std::vector<Way> ways;
  for (int i = 0; i < kRanks * (kRanks - 1) * kChannels; ++i) ways.push_back({.ends = connect()});
  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  // A thread of NCCL's has the connections of a rank.
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      std::minstd_rand random(rank + 1);
      for (int round = 0; round < 10; ++round) {
        for (size_t i = rank; i < ways.size(); i += kRanks) {
          Way& way = ways[i];
          way.sent = pattern(random() % 200'000, static_cast<uint8_t>(random()));
          way.received.assign(200'000, 0);
          way.receive = receive(way.ends.receiving, way.received);
          way.send = send(way.ends.sending, way.sent);
        }
        for (size_t i = rank; i < ways.size(); i += kRanks) {
          Way& way = ways[i];
          int size = 0;
          if (finish(way.receive, &size) != Result::kSuccess || finish(way.send) != Result::kSuccess) ++wrong;
          way.received.resize(static_cast<size_t>(size));
          if (way.received != way.sent) ++wrong;
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  for (const auto& way : ways) close(way.ends);
}

TEST_F(NcclNet, TheOlderInterfaceIsTheSameNetwork) {
  const auto* const older = static_cast<const NetV10*>(symbol("ncclNetPlugin_v10"));
  ASSERT_NE(older, nullptr);
  ASSERT_EQ(older->init(&log, nullptr), Result::kSuccess);
  PropertiesV10 properties;
  ASSERT_EQ(older->getProperties(0, &properties), Result::kSuccess);
  EXPECT_EQ(properties.ptrSupport, kPtrHost);
  Handle handle{};
  void* listening = nullptr;
  Ends ends;
  CommConfig config{.trafficClass = -1};
  ASSERT_EQ(older->listen(0, handle.data(), &listening), Result::kSuccess);
  for (int i = 0; i < 20'000 && (!ends.sending || !ends.receiving); ++i) {
    if (!ends.sending) older->connect(0, &config, handle.data(), &ends.sending, nullptr);
    if (!ends.receiving) older->transfer.accept(listening, &ends.receiving, nullptr);
    std::this_thread::sleep_for(1ms);
  }
  ASSERT_TRUE(ends.sending && ends.receiving);
  EXPECT_EQ(older->transfer.closeListen(listening), Result::kSuccess);
  ASSERT_NO_FATAL_FAILURE(expectAMessageArrives(ends));
  close(ends);
}

}  // namespace
}  // namespace bagua::nccl_net
