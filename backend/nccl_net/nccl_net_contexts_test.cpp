// SPDX-License-Identifier: Apache-2.0
// Communicators that come and go, are aborted half-way, or are inherited by a forked child.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iterator>
#include <string>

#include "tests/support/nccl_plugin.h"

namespace bagua::nccl_net {
namespace {

long entriesOf(const char* folder) {
  return std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator());
}

// The handle of a process that is not there: nobody listens at port 1.
Handle ofNobody(const Handle& handle, int number) {
  Handle changed = handle;
  // A number and the pair, then the process as text.
  constexpr size_t kPair = 8;
  constexpr size_t kProcess = 16;
  std::memcpy(changed.data() + kPair, &number, sizeof(number));
  // Its first digit is never this process's own, which would be reached at once.
  constexpr std::string_view kDigits = "0123456789abcdef";
  const size_t first = kDigits.find(changed[kProcess]);
  changed[kProcess] = kDigits.at((first + 1 + number % 15) % 16);
  changed[kProcess + 1] = kDigits.at(number / 15);
  char* const colon = std::find(changed.begin() + kProcess, changed.end(), ':');
  std::fill(colon + 1, changed.end(), '\0');
  *std::next(colon) = '1';
  return changed;
}

TEST_F(NcclNet, TwoCommunicatorsAtOnceDoNotEndEachOther) {
  void* const other = newContext();
  Handle own{};
  Handle others{};
  void* const listening = listen(context_, own);
  listen(other, others);
  const Ends ends = connect(other);
  ASSERT_EQ(plugin().finalize(other), Result::kSuccess);
  // What the other one has not closed ends with it, but for what it was given.
  void* const tooLate = dial(context_, others);
  ASSERT_NE(tooLate, nullptr);
  EXPECT_EQ(sendInVain(tooLate), Result::kRemoteError);
  EXPECT_EQ(transfer().closeSend(tooLate), Result::kSuccess);
  ASSERT_NO_FATAL_FAILURE(expectAMessageArrives(ends));
  close(ends);
  Ends stillOwn{.sending = dial(context_, own)};
  ASSERT_NE(stillOwn.sending, nullptr);
  for (int i = 0; i < 20'000 && !stillOwn.receiving; ++i) {
    ASSERT_EQ(transfer().accept(listening, &stillOwn.receiving, nullptr), Result::kSuccess);
    std::this_thread::sleep_for(1ms);
  }
  ASSERT_NE(stillOwn.receiving, nullptr);
  EXPECT_EQ(transfer().closeListen(listening), Result::kSuccess);
  ASSERT_NO_FATAL_FAILURE(expectAMessageArrives(stillOwn));
  close(stillOwn);
}

TEST_F(NcclNet, AfterTheLastCommunicatorAnotherOneWorks) {
  const Ends before = connect();
  ASSERT_EQ(plugin().finalize(context_), Result::kSuccess);
  ASSERT_NO_FATAL_FAILURE(expectAMessageArrives(before));
  close(before);
  context_ = newContext();
  const Ends after = connect();
  ASSERT_NO_FATAL_FAILURE(expectAMessageArrives(after));
  close(after);
}

// NCCL closes what it was given, and forgets what it still waits for.
TEST_F(NcclNet, SetUpsThatAreAbortedLeaveNothingBehind) {
  const Ends first = connect();
  close(first);
  const long files = entriesOf("/proc/self/fd");
  const long threads = entriesOf("/proc/self/task");
  for (int round = 0; round < 20; ++round) {
    void* const context = newContext();
    Handle handle{};
    listen(context, handle);
    void* const sending = dial(context, handle);
    ASSERT_NE(sending, nullptr);
    Handle nobody = ofNobody(handle, round);
    void* dialing = nullptr;
    ASSERT_EQ(plugin().connect(context, 0, nobody.data(), &dialing, nullptr), Result::kSuccess);
    ASSERT_EQ(dialing, nullptr);
    ASSERT_EQ(plugin().finalize(context), Result::kSuccess);
    EXPECT_EQ(sendInVain(sending), Result::kRemoteError) << "a listener is left";
    EXPECT_EQ(transfer().closeSend(sending), Result::kSuccess);
    // Whoever has given up a pair cannot be a part of it again.
    EXPECT_EQ(plugin().connect(context_, 0, nobody.data(), &dialing, nullptr), Result::kRemoteError)
        << "a sender is left";
  }
  const auto hasMore = [&] { return entriesOf("/proc/self/fd") > files || entriesOf("/proc/self/task") > threads; };
  for (const auto end = std::chrono::steady_clock::now() + 10s; hasMore() && std::chrono::steady_clock::now() < end;) {
    std::this_thread::sleep_for(10ms);
  }
  EXPECT_LE(entriesOf("/proc/self/fd"), files);
  EXPECT_LE(entriesOf("/proc/self/task"), threads);
}

// The older interface does not say when a communicator ends, and begins again only when there is none.
TEST_F(NcclNet, TheOlderInterfaceEndsWhatIsLeftWhenItBeginsAgain) {
  const auto* const older = static_cast<const NetV10*>(symbol("ncclNetPlugin_v10"));
  ASSERT_EQ(older->init(&log, nullptr), Result::kSuccess);
  Handle handle{};
  void* listening = nullptr;
  ASSERT_EQ(older->listen(0, handle.data(), &listening), Result::kSuccess);
  void* const sending = dial(context_, handle);
  ASSERT_NE(sending, nullptr);
  ASSERT_EQ(older->init(&log, nullptr), Result::kSuccess);
  EXPECT_EQ(sendInVain(sending), Result::kRemoteError);
  EXPECT_EQ(transfer().closeSend(sending), Result::kSuccess);
}

TEST_F(NcclNet, AForkedChildIsRefusedWhatIsItsParents) {
  Ends ends = connect();
  Handle handle{};
  void* const listening = listen(context_, handle);
  const Bytes sent(1);
  Bytes place(1);
  void* const receiving = receive(ends.receiving, place);
  const pid_t child = fork();
  if (child == 0) {
    void* out = nullptr;
    void* data = place.data();
    size_t size = 1;
    int tag = 0;
    int isDone = 0;
    const std::function<Result()> calls[] = {
        [&] { return transfer().isend(ends.sending, data, size, tag, nullptr, nullptr, &out); },
        [&] { return transfer().irecv(ends.receiving, 1, &data, &size, &tag, nullptr, nullptr, &out); },
        [&] { return transfer().test(receiving, &isDone, nullptr); },
        [&] { return transfer().accept(listening, &out, nullptr); },
        [&] { return transfer().closeListen(listening); },
        [&] { return transfer().closeSend(ends.sending); },
        [&] { return plugin().listen(context_, 0, handle.data(), &out); },
        [&] { return plugin().connect(context_, 0, handle.data(), &out, nullptr); },
        [&] { return plugin().finalize(context_); },
    };
    int wrong = 0;
    for (const auto& call : calls) {
      warnings.clear();
      if (call() != Result::kInvalidUsage || lastWarning().find("forked") == std::string::npos) ++wrong;
    }
    // Else NCCL would take its own sockets.
    CommConfig config{.trafficClass = -1};
    PropertiesV11 properties;
    if (plugin().init(&out, 1, &config, &log, nullptr) != Result::kSuccess) ++wrong;
    if (plugin().getProperties(0, &properties) != Result::kSuccess) ++wrong;
    _exit(wrong);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  void* const request = send(ends.sending, sent);
  EXPECT_EQ(finish(receiving), Result::kSuccess);
  EXPECT_EQ(finish(request), Result::kSuccess);
  EXPECT_EQ(transfer().closeListen(listening), Result::kSuccess);
  close(ends);
}

}  // namespace
}  // namespace bagua::nccl_net
