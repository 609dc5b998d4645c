// SPDX-License-Identifier: Apache-2.0
// What comes of a connection that is given up, closed or broken, and of memory that is taken away.
#include <algorithm>
#include <atomic>
#include <random>

#include "tests/support/nccl_plugin.h"
#include "tests/support/open_sockets.h"

namespace bagua::nccl_net {
namespace {

TEST_F(NcclNet, AMessageLargerThanItsPlaceIsAnErrorThatSaysSo) {
  const Ends ends = connect();
  Bytes place(100, 0xEE);
  void* const receiving = receive(ends.receiving, place);
  const Bytes sent(101);
  void* const sending = send(ends.sending, sent);
  EXPECT_EQ(finish(receiving), Result::kInvalidUsage);
  EXPECT_NE(lastWarning().find("a message of 101 bytes has come for 100"), std::string::npos) << lastWarning();
  EXPECT_EQ(place, Bytes(100, 0xEE));
  EXPECT_EQ(finish(sending), Result::kSuccess);
  close(ends);
}

TEST_F(NcclNet, WhatWasSentBeforeTheSenderHasClosedArrivesAndNothingElse) {
  const Ends ends = connect();
  const Bytes sent = pattern(3'000'000, 5);
  Bytes place(sent.size());
  ASSERT_EQ(finish(send(ends.sending, sent)), Result::kSuccess);
  ASSERT_EQ(transfer().closeSend(ends.sending), Result::kSuccess);
  ASSERT_EQ(finish(receive(ends.receiving, place)), Result::kSuccess);
  EXPECT_TRUE(place == sent);
  void* const next = receive(ends.receiving, place);
  EXPECT_EQ(finish(next), Result::kRemoteError);
  EXPECT_NE(lastWarning().find("receiving from "), std::string::npos) << lastWarning();
  EXPECT_NE(lastWarning().find("it has closed its end"), std::string::npos) << lastWarning();
  EXPECT_EQ(warnings.size(), 1U);
  void* request = nullptr;
  void* data = place.data();
  size_t size = place.size();
  int tag = 0;
  EXPECT_EQ(transfer().irecv(ends.receiving, 1, &data, &size, &tag, nullptr, nullptr, &request), Result::kRemoteError);
  EXPECT_EQ(warnings.size(), 1U) << "one line for each connection";
  EXPECT_EQ(transfer().closeRecv(ends.receiving), Result::kSuccess);
}

TEST_F(NcclNet, ASenderHearsOfAReceiverThatHasClosed) {
  const Ends ends = connect();
  // More than leaves without a place for it.
  const Bytes sent(64 << 20);
  void* const request = send(ends.sending, sent);
  EXPECT_EQ(transfer().closeRecv(ends.receiving), Result::kSuccess);
  EXPECT_EQ(finish(request), Result::kRemoteError);
  EXPECT_NE(lastWarning().find("sending to "), std::string::npos) << lastWarning();
  EXPECT_EQ(transfer().closeSend(ends.sending), Result::kSuccess);
  const Ends small = connect();
  EXPECT_EQ(transfer().closeRecv(small.receiving), Result::kSuccess);
  EXPECT_EQ(sendInVain(small.sending), Result::kRemoteError);
  EXPECT_EQ(transfer().closeSend(small.sending), Result::kSuccess);
}

TEST_F(NcclNet, AConnectionThatIsGivenUpHalfWayHindersNoOther) {
  Handle handle{};
  // A listener to which nobody comes, one whose sender comes and is not let in, and one whose sender comes too late.
  void* listening = listen(context_, handle);
  void* receiving = static_cast<void*>(&receiving);
  EXPECT_EQ(transfer().accept(listening, &receiving, nullptr), Result::kSuccess);
  EXPECT_EQ(receiving, nullptr);
  EXPECT_EQ(transfer().closeListen(listening), Result::kSuccess);
  for (const bool isLate : {false, true}) {
    listening = listen(context_, handle);
    if (isLate) {
      EXPECT_EQ(transfer().closeListen(listening), Result::kSuccess);
    }
    void* const sending = dial(context_, handle);
    ASSERT_NE(sending, nullptr);
    std::this_thread::sleep_for(100ms);
    if (!isLate) {
      EXPECT_EQ(transfer().closeListen(listening), Result::kSuccess);
    }
    EXPECT_EQ(sendInVain(sending), Result::kRemoteError);
    EXPECT_NE(lastWarning().find("it has closed its end"), std::string::npos) << lastWarning();
    EXPECT_EQ(transfer().closeSend(sending), Result::kSuccess);
  }
  const Ends ends = connect();
  ASSERT_NO_FATAL_FAILURE(expectAMessageArrives(ends));
  close(ends);
}

TEST_F(NcclNet, TheHandleOfAnotherNetworkIsRefusedWithAdvice) {
  Handle handle{};
  void* sending = nullptr;
  EXPECT_EQ(plugin().connect(context_, 0, handle.data(), &sending, nullptr), Result::kInvalidUsage);
  EXPECT_EQ(sending, nullptr);
  EXPECT_NE(lastWarning().find("NCCL_NET_PLUGIN"), std::string::npos) << lastWarning();
}

// NCCL frees the memory of a connection before it closes it, whatever is under way.
TEST_F(NcclNet, MemoryIsNotTouchedOnceItsRegistrationHasEnded) {
  constexpr size_t kSize = 36 << 20;
  for (const bool isSender : {true, false}) {
    const Ends ends = connect();
    Bytes memory(kSize, 0xEE);
    void* const connection = isSender ? ends.sending : ends.receiving;
    void* registration = nullptr;
    ASSERT_EQ(transfer().regMr(connection, memory.data(), kSize, kPtrHost, &registration), Result::kSuccess);
    ASSERT_NE(isSender ? send(ends.sending, memory) : receive(ends.receiving, memory), nullptr);
    ASSERT_EQ(transfer().deregMr(connection, registration), Result::kSuccess);
    Bytes other(kSize);
    void* const begun = isSender ? receive(ends.receiving, other) : send(ends.sending, other);
    int isDone = 0;
    for (int i = 0; i < 50 && isDone == 0; ++i) {
      std::this_thread::sleep_for(20ms);
      ASSERT_EQ(transfer().test(begun, &isDone, nullptr), Result::kSuccess);
    }
    if (isSender) {
      EXPECT_EQ(isDone, 0) << "all of it has come";
    } else {
      EXPECT_EQ(std::count(memory.begin(), memory.end(), 0xEE), static_cast<long>(kSize));
    }
    close(ends);
  }
}

TEST_F(NcclNet, ResetsOfTheConnectionsBelowCostOnlyTime) {
  const Ends ends = connect();
  std::atomic<bool> isOver = false;
  std::atomic<int> resets = 0;
  std::thread trouble([&] {
    std::minstd_rand random(1);
    while (!isOver) {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 40'000));
      resets += net::resetConnections([](uint16_t, uint16_t) { return true; });
    }
  });
  bool isWhole = true;
  for (int round = 0; isWhole && resets < 20; ++round) {
    Bytes sent = pattern(round % 3 == 0 ? 5'000'000 : 100'000, static_cast<uint8_t>(round));
    const Bytes expected = sent;
    Bytes place(sent.size());
    void* const receiving = receive(ends.receiving, place);
    isWhole = finish(send(ends.sending, sent)) == Result::kSuccess;
    std::fill(sent.begin(), sent.end(), 0xEE);
    isWhole = isWhole && finish(receiving) == Result::kSuccess && place == expected;
  }
  isOver = true;
  trouble.join();
  EXPECT_TRUE(isWhole) << "after " << resets << " resets: " << lastWarning();
  close(ends);
}

}  // namespace
}  // namespace bagua::nccl_net
