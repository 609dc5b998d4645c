// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstring>
#include <ctime>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "backend/cpu/shared_memory/meeting_room.h"
#include "backend/os/shared_segment.h"
#include "tests/support/child_processes.h"
#include "tests/support/thread_ranks.h"

namespace bagua {
namespace {

using testing::inKilledProcess;
using testing::inOwnPidNamespace;
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

// Restricts the calling thread to the first core that it may use.
void stayOnFirstCore() {
  cpu_set_t cores;
  ASSERT_EQ(::sched_getaffinity(0, sizeof(cores), &cores), 0);
  int first = 0;
  while (!CPU_ISSET(first, &cores)) ++first;
  CPU_ZERO(&cores);
  CPU_SET(first, &cores);
  ASSERT_EQ(::sched_setaffinity(0, sizeof(cores), &cores), 0);
}

Clock::duration processorTimeOfThisThread() {
  timespec time{};
  EXPECT_EQ(::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time), 0);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

// As where the system has put two processes on one core: each could spin only while the other cannot arrive.
TEST(MeetingRoom, RanksOnOneCoreMakeRoomForEachOther) {
  constexpr int kRanks = 2;
  constexpr int kRounds = 2000;
  auto creator = newSegment(kRanks);
  std::array<Clock::duration, kRanks> taken{};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      // First, so that it counts all cores.
      MeetingRoom room(openAgain(creator, kRanks), rank, names(kRanks));
      stayOnFirstCore();
      for (int round = 0; round < kRounds; ++round) room.meet(Clock::now() + std::chrono::seconds(20));
      taken[rank] = processorTimeOfThisThread();
    });
  }
  for (auto& thread : threads) thread.join();
  // Spinning, one of them takes 100 us at each meeting.
  EXPECT_LT((taken[0] + taken[1]) / kRounds, std::chrono::microseconds(50));
}

// A sleeper that is not woken looks again after 50 ms.
TEST(MeetingRoom, ALateRankWakesWhoSleeps) {
  constexpr int kRounds = 31;
  if (std::thread::hardware_concurrency() < 2) GTEST_SKIP() << "the late rank needs a core of its own";
  auto creator = newSegment(2);
  std::array<Clock::time_point, kRounds> came;
  std::array<Clock::time_point, kRounds> woke;
  std::thread sleeper([&] {
    MeetingRoom room(openAgain(creator, 2), 0, names(2));
    for (auto& time : woke) {
      room.meet(Clock::now() + std::chrono::seconds(20));
      time = Clock::now();
    }
  });
  MeetingRoom room(openAgain(creator, 2), 1, names(2));
  for (auto& time : came) {
    std::this_thread::sleep_for(milliseconds(5));
    time = Clock::now();
    room.meet(Clock::now() + std::chrono::seconds(20));
  }
  sleeper.join();
  std::vector<Clock::duration> delays;
  for (int round = 0; round < kRounds; ++round) delays.push_back(woke[round] - came[round]);
  std::nth_element(delays.begin(), delays.begin() + kRounds / 2, delays.end());
  EXPECT_LT(delays[kRounds / 2], milliseconds(10));
}

TEST(MeetingRoom, NamesTheRankThatDoesNotCome) {
  auto segment = newSegment(2);
  MeetingRoom other(openAgain(segment, 2), 1, names(2));
  MeetingRoom room(std::move(segment), 0, names(2));
  EXPECT_EQ(messageOfMeeting(room, milliseconds(80)), "rank 1 has not arrived in time");
}

// A peer that is always there could otherwise keep an exchange going for ever.
TEST(MeetingRoom, EndsAtTheDeadlineThoughAllAreThere) {
  auto segment = newSegment(2);
  MeetingRoom other(openAgain(segment, 2), 1, names(2));
  // Arrived at a meeting far in the future: the first word of its seat.
  constexpr uint32_t kFar = 1'000'000;
  std::memcpy(segment.data() + MeetingRoom::bytesPerSeat(), &kFar, sizeof(kFar));
  MeetingRoom room(std::move(segment), 0, names(2));
  EXPECT_EQ(messageOfMeeting(room, milliseconds(5000)), "");
  EXPECT_EQ(messageOfMeeting(room, milliseconds(0)), "the exchange in shared memory has not ended in time");
}

TEST(MeetingRoom, ASeatIsTakenOnce) {
  auto segment = newSegment(2);
  auto again = openAgain(segment, 2);
  const MeetingRoom room(std::move(segment), 0, names(2));
  EXPECT_THROW(const MeetingRoom intruder(std::move(again), 0, names(2)), c10::Error);
}

// Returns when somebody sleeps on the rank's arrival: the second word of its seat counts them.
void waitForSleeper(const SharedSegment& segment, int rank) {
  auto* const seat = segment.data() + rank * MeetingRoom::bytesPerSeat();
  const std::atomic_ref<uint32_t> sleepers(*reinterpret_cast<uint32_t*>(seat + sizeof(uint32_t)));
  while (sleepers.load() == 0) std::this_thread::yield();
}

TEST(MeetingRoom, ARankThatGivesUpWakesTheOthers) {
  auto segment = newSegment(2);
  const auto watched = openAgain(segment, 2);
  MeetingRoom other(openAgain(segment, 2), 1, names(2));
  MeetingRoom room(std::move(segment), 0, names(2));
  std::thread quitter([&] {
    waitForSleeper(watched, 1);
    other.abort();
  });
  const auto begin = Clock::now();
  EXPECT_NE(messageOfMeeting(room, milliseconds(20'000)).find("rank 1 has left"), std::string::npos);
  EXPECT_LT(Clock::now() - begin, milliseconds(2000));
  quitter.join();
}

ProgramFingerprint programOf(const char* name, int64_t numel, uint64_t sequence) {
  Operation operation{.name = name, .dtype = at::kFloat, .numel = numel};
  operation.sequence = sequence;
  return fingerprintOf(operation);
}

TEST(MeetingRoom, RanksOfDifferentProgramsAreAllToldBoth) {
  auto segment = newSegment(2);
  MeetingRoom second(openAgain(segment, 2), 1, names(2));
  MeetingRoom first(std::move(segment), 0, names(2));
  first.setProgram(programOf("first", 4, 0));
  second.setProgram(programOf("first", 4, 0));
  std::string theirs;
  std::thread other([&] {
    theirs = messageOfMeeting(second, milliseconds(20'000));
    second.setProgram(programOf("second", 5, 1));
    theirs += messageOfMeeting(second, milliseconds(20'000));
  });
  EXPECT_EQ(messageOfMeeting(first, milliseconds(20'000)), "");
  first.setProgram(programOf("second", 4, 1));
  const std::string own = messageOfMeeting(first, milliseconds(20'000));
  other.join();
  EXPECT_EQ(own, theirs);
  EXPECT_NE(own.find("rank 0 is in second #1 (Float[4]), rank 1 in second #1 (Float[5])"), std::string::npos) << own;
}

// It may wait for a rank of another host, which waits for this one: nobody would ever come.
TEST(MeetingRoom, WhoWaitsForARankInAnotherProgramIsToldThoughItNeverComes) {
  auto segment = newSegment(3);
  MeetingRoom third(openAgain(segment, 3), 2, names(3));
  MeetingRoom second(openAgain(segment, 3), 1, names(3));
  MeetingRoom first(std::move(segment), 0, names(3));
  first.setProgram(programOf("here", 4, 18));
  second.setProgram(programOf("here", 4, 18));
  third.setProgram(programOf("elsewhere", 4, 18));
  const auto begin = Clock::now();
  // Though it is the second that it waits for at first.
  const std::string message = messageOfMeeting(first, milliseconds(20'000));
  EXPECT_NE(message.find("rank 0 is in here #18 (Float[4]), rank 2 in elsewhere #18 (Float[4])"), std::string::npos)
      << message;
  EXPECT_LT(Clock::now() - begin, milliseconds(2000));
}

TEST(MeetingRoom, WaitsForARankThatHasNotBegunTheProgramYet) {
  auto segment = newSegment(3);
  // Has said nothing at all.
  const MeetingRoom third(openAgain(segment, 3), 2, names(3));
  MeetingRoom second(openAgain(segment, 3), 1, names(3));
  MeetingRoom first(std::move(segment), 0, names(3));
  first.setProgram(programOf("first", 4, 0));
  second.setProgram(programOf("next", 5, 2));
  EXPECT_EQ(messageOfMeeting(first, milliseconds(120)), "rank 1 has not arrived in time");
}

// Has the sleepers on a rank's arrival look again.
void wakeSleepers(const SharedSegment& segment, int rank) {
  auto* const arrived = segment.data() + rank * MeetingRoom::bytesPerSeat();
  ::syscall(SYS_futex, arrived, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

TEST(MeetingRoom, AProgramThatIsBeingSetIsNotTakenForAnother) {
  auto segment = newSegment(2);
  const auto watched = openAgain(segment, 2);
  MeetingRoom second(openAgain(segment, 2), 1, names(2));
  MeetingRoom first(std::move(segment), 0, names(2));
  first.setProgram(programOf("first", 4, 0));
  std::atomic<bool> isOver{false};
  // Half of one and half of the other would be number 0 with another name.
  std::thread setter([&] {
    const auto same = programOf("first", 4, 0);
    const auto next = programOf("second", 5, 2);
    while (!isOver) {
      second.setProgram(same);
      second.setProgram(next);
    }
  });
  std::thread waker([&] {
    while (!isOver) wakeSleepers(watched, 1);
  });
  EXPECT_EQ(messageOfMeeting(first, milliseconds(500)), "rank 1 has not arrived in time");
  isOver = true;
  setter.join();
  waker.join();
}

TEST(MeetingRoom, NoticesAProcessThatEnded) {
  auto segment = newSegment(2);
  std::array<int, 2> seated{};
  ASSERT_EQ(::pipe(seated.data()), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);
    const auto watched = openAgain(segment, 2);
    new MeetingRoom(openAgain(segment, 2), 1, names(2));  // never destroyed: killed
    const char here = 1;
    if (::write(seated[1], &here, 1) != 1) ::_exit(1);
    waitForSleeper(watched, 1);
    ::_exit(0);
  }
  ::close(seated[1]);
  char here = 0;
  ASSERT_EQ(::read(seated[0], &here, 1), 1) << "the child has not taken its seat";
  ::close(seated[0]);
  MeetingRoom room(std::move(segment), 0, names(2));
  EXPECT_EQ(messageOfMeeting(room, milliseconds(20'000)),
            "Connection closed by peer: the process of rank 1 (" + std::to_string(child) + ") has ended");
  ::waitpid(child, nullptr, 0);
}

TEST(MeetingRoom, NoticesAProcessThatEndedThoughItHadTheSameProcessId) {
  constexpr int kDone = 7;
  const auto segment = newSegment(2);
  const auto ended = inOwnPidNamespace([&] {
    new MeetingRoom(openAgain(segment, 2), 1, names(2));  // never destroyed
    ::_exit(::getpid() == 1 ? kDone : 0);
  });
  if (!ended) GTEST_SKIP() << "this user may not make a pid namespace";
  ASSERT_EQ(ended, kDone);
  const auto noticed = inOwnPidNamespace([&] {
    MeetingRoom room(openAgain(segment, 2), 0, names(2));
    const std::string message = messageOfMeeting(room, milliseconds(2000));
    ::_exit(message.find("the process of rank 1 (1) has ended") != std::string::npos ? kDone : 0);
  });
  EXPECT_EQ(noticed, kDone);
}

TEST(MeetingRoom, NoticesADeathWhileItWaitsForAnother) {
  constexpr int kRanks = 20;
  auto segment = newSegment(kRanks);
  inKilledProcess([&] { new MeetingRoom(openAgain(segment, kRanks), kRanks - 1, names(kRanks)); });
  // All but the last are there, and the first takes its time.
  std::vector<std::unique_ptr<MeetingRoom>> slow;
  for (int rank = 0; rank < kRanks - 2; ++rank) {
    slow.push_back(std::make_unique<MeetingRoom>(openAgain(segment, kRanks), rank, names(kRanks)));
  }
  MeetingRoom room(std::move(segment), kRanks - 2, names(kRanks));
  const auto begin = Clock::now();
  EXPECT_NE(messageOfMeeting(room, milliseconds(5000)).find("the process of rank 19"), std::string::npos);
  EXPECT_LT(Clock::now() - begin, milliseconds(2000));
}

TEST(MeetingRoom, NoticesADeathThoughAChildLivesOn) {
  auto segment = newSegment(2);
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe(ends.data()), 0);
  inKilledProcess([&] {
    new MeetingRoom(openAgain(segment, 2), 1, names(2));  // never destroyed: killed
    if (::fork() != 0) return;
    // As a data loader's worker: until the test is over.
    ::close(ends[1]);
    char none = 0;
    ::_exit(static_cast<int>(::read(ends[0], &none, 1)));
  });
  MeetingRoom room(std::move(segment), 0, names(2));
  EXPECT_NE(messageOfMeeting(room, milliseconds(2000)).find("the process of rank 1"), std::string::npos);
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST(MeetingRoom, AForkedChildLeavesTheSeatToItsParent) {
  auto segment = newSegment(2);
  auto other = std::make_unique<MeetingRoom>(openAgain(segment, 2), 1, names(2));
  auto own = std::make_unique<MeetingRoom>(std::move(segment), 0, names(2));
  const pid_t child = ::fork();
  if (child == 0) {
    own->abort();
    own.reset();
    other.reset();
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  std::thread peer([&] { other->meet(Clock::now() + std::chrono::seconds(5)); });
  EXPECT_NO_THROW(own->meet(Clock::now() + std::chrono::seconds(5)));
  peer.join();
}

TEST(MeetingRoom, TellsARankThatHasLeftFromAProcessThatEnded) {
  auto segment = newSegment(2);
  inKilledProcess([&] { const MeetingRoom room(openAgain(segment, 2), 1, names(2)); });
  MeetingRoom room(std::move(segment), 0, names(2));
  EXPECT_NE(messageOfMeeting(room, milliseconds(20'000)).find("rank 1 has left"), std::string::npos);
}

}  // namespace
}  // namespace bagua
