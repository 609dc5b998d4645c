// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <thread>

#include "backend/host/shared_memory/meeting_room.h"
#include "backend/host/shared_memory/shared_segment.h"
#include "tests/support/thread_ranks.h"

namespace bagua {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

SharedSegment newSegment(int ranks) {
  std::string whyNot;
  auto segment = SharedSegment::create(MeetingRoom::bytesFor(ranks), whyNot);
  TORCH_CHECK(segment.has_value(), whyNot);
  return std::move(*segment);
}

SharedSegment openAgain(const SharedSegment& segment, int ranks) {
  std::string whyNot;
  auto opened = SharedSegment::open(segment.name(), MeetingRoom::bytesFor(ranks), whyNot);
  TORCH_CHECK(opened.has_value(), whyNot);
  return std::move(*opened);
}

std::vector<std::string> names(int ranks) {
  std::vector<std::string> all;
  for (int rank = 0; rank < ranks; ++rank) all.push_back("rank " + std::to_string(rank));
  return all;
}

std::string messageOfMeeting(MeetingRoom& room, milliseconds limit) {
  try {
    room.meet(Clock::now() + limit);
  } catch (const c10::DistNetworkError& error) {
    return error.what_without_backtrace();
  }
  return "";
}

TEST(SharedSegment, LeavesNoNameBehind) {
  std::string name;
  {
    auto segment = newSegment(2);
    name = segment.name();
    openAgain(segment, 2).removeName();  // not the creator: no effect
    segment.removeName();
    std::string whyNot;
    EXPECT_FALSE(SharedSegment::open(name, 1, whyNot).has_value());
    EXPECT_NE(whyNot.find("No such file"), std::string::npos) << whyNot;
  }
  EXPECT_LT(::shm_open(name.c_str(), O_RDWR, 0), 0);
}

TEST(SharedSegment, TellsWhyThereIsNone) {
  std::string whyNot;
  EXPECT_FALSE(SharedSegment::create(size_t{1} << 50U, whyNot).has_value());
  EXPECT_NE(whyNot.find("posix_fallocate"), std::string::npos) << whyNot;
}

TEST(MeetingRoom, ShowsEveryRoundWhatThePeersWrote) {
  constexpr int kRanks = 3;
  constexpr uint32_t kRounds = 2000;
  auto creator = newSegment(kRanks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&creator, rank] {
      MeetingRoom room(openAgain(creator, kRanks), rank, names(kRanks));
      for (uint32_t round = 0; round < kRounds; ++round) {
        const uint32_t own = round * kRanks + rank;
        std::memcpy(room.ownSlot(), &own, sizeof(own));
        room.meet(Clock::now() + std::chrono::seconds(20));
        for (int peer = 0; peer < kRanks; ++peer) {
          uint32_t shown = 0;
          std::memcpy(&shown, room.shown(peer), sizeof(shown));
          ASSERT_EQ(shown, round * kRanks + peer);
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(MeetingRoom, NamesTheRankThatDoesNotCome) {
  auto segment = newSegment(2);
  MeetingRoom other(openAgain(segment, 2), 1, names(2));
  MeetingRoom room(std::move(segment), 0, names(2));
  EXPECT_EQ(messageOfMeeting(room, milliseconds(80)), "rank 1 has not arrived in time");
}

TEST(MeetingRoom, ARankThatGivesUpWakesTheOthers) {
  auto segment = newSegment(2);
  MeetingRoom other(openAgain(segment, 2), 1, names(2));
  MeetingRoom room(std::move(segment), 0, names(2));
  std::thread quitter([&] {
    std::this_thread::sleep_for(milliseconds(30));
    other.abort();
  });
  const auto begin = Clock::now();
  EXPECT_NE(messageOfMeeting(room, milliseconds(20'000)).find("rank 1 has left"), std::string::npos);
  EXPECT_LT(Clock::now() - begin, milliseconds(2000));
  quitter.join();
}

TEST(MeetingRoom, NoticesAProcessThatEnded) {
  auto segment = newSegment(2);
  const pid_t child = ::fork();
  if (child == 0) {
    auto mapped = openAgain(segment, 2);
    new MeetingRoom(std::move(mapped), 1, names(2));  // never destroyed: killed
    ::usleep(100'000);
    ::_exit(0);
  }
  ::usleep(50'000);
  MeetingRoom room(std::move(segment), 0, names(2));
  EXPECT_NE(messageOfMeeting(room, milliseconds(20'000)).find("the process of rank 1"), std::string::npos);
  ::waitpid(child, nullptr, 0);
}

}  // namespace
}  // namespace bagua
