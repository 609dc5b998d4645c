// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/shared_memory/meeting_room.h"

#include <c10/util/Exception.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <climits>
#include <ctime>
#include <thread>
#include <utility>

#include "backend/operation/peer_errors.h"

namespace bagua {
namespace {

using Clock = std::chrono::steady_clock;

// How long a rank looks at a peer's counter before it sleeps. Longer than it takes to wake up, 50 to 70 us here: ranks
// that sleep in turn would wait for each other's waking for ever (an allreduce of 4 KiB took 71 us, all of them).
constexpr std::chrono::microseconds kSpinTime{100};
// With more ranks than cores the peer needs this core to arrive.
constexpr std::chrono::microseconds kSpinTimeWhenCrowded{2};
constexpr int kLooksPerClock = 16;
// How long a rank sleeps before it looks whether the other is still there.
constexpr long kSleepNanoseconds = 50'000'000;
// At how many ranks, beside the one it waits for, a rank then looks: in turn at all of them, 128 within half a second.
constexpr int kRanksPerLook = 16;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t) && std::atomic<uint32_t>::is_always_lock_free);
  return ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

}  // namespace

size_t MeetingRoom::bytesPerSeat() { return sizeof(Seat); }

size_t MeetingRoom::bytesFor(int ranks) { return ranks * (sizeof(Seat) + 2 * kSlotBytes); }

MeetingRoom::MeetingRoom(SharedSegment segment, int rank, std::vector<std::string> names)
    : segment_(std::move(segment)),
      rank_(rank),
      names_(std::move(names)),
      isCrowded_(size() > static_cast<int>(std::thread::hardware_concurrency())) {
  segment_.take(rank_);
  // Zeros of a new segment are valid seats.
  seat(rank_).process = ::getpid();
}

MeetingRoom::~MeetingRoom() {
  if (segment_.isOpen()) seat(rank_).hasGivenUp = 1;
}

uint8_t* MeetingRoom::slot(int rank, uint32_t round) const {
  return segment_.data() + size() * sizeof(Seat) + (2 * static_cast<int64_t>(rank) + round % 2) * kSlotBytes;
}

void MeetingRoom::setProgram(const ProgramFingerprint& program) {
  program_ = program;
  programHash_ = program.hash();
  seat(rank_).announcement.write(program);
}

// A reader that has seen a new word sees a new version, too, as every word is released and acquired.
void MeetingRoom::Announcement::write(const ProgramFingerprint& program) {
  const auto words = std::bit_cast<std::array<uint64_t, kWords>>(program);
  const uint64_t version = version_.load(std::memory_order_relaxed) | 1U;
  version_.store(version, std::memory_order_relaxed);
  for (size_t i = 0; i < kWords; ++i) words_[i].store(words[i], std::memory_order_release);
  version_.store(version + 1, std::memory_order_release);
}

std::optional<ProgramFingerprint> MeetingRoom::Announcement::read() const {
  const uint64_t version = version_.load(std::memory_order_acquire);
  if (version == 0 || version % 2 != 0) return std::nullopt;
  std::array<uint64_t, kWords> words{};
  for (size_t i = 0; i < kWords; ++i) words[i] = words_[i].load(std::memory_order_acquire);
  if (version_.load(std::memory_order_relaxed) != version) return std::nullopt;
  return std::bit_cast<ProgramFingerprint>(words);
}

void MeetingRoom::meet(Clock::time_point deadline) {
  // Also where everybody is always there: how many meetings there are may be a peer's word.
  if (Clock::now() >= deadline) fail("the exchange in shared memory has not ended in time");
  arrive();
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank_) continue;
    waitFor(peer, deadline);
    checkSameProgram(peer);
  }
}

void MeetingRoom::arrive() {
  Seat& own = seat(rank_);
  own.core.store(::sched_getcpu(), std::memory_order_relaxed);
  own.program[(round_ + 1) % 2].store(programHash_, std::memory_order_relaxed);
  own.arrived.store(++round_);
  if (own.sleepers.load() > 0) futex(own.arrived, FUTEX_WAKE, INT_MAX, nullptr);
}

void MeetingRoom::waitFor(int rank, Clock::time_point deadline) {
  Seat& peer = seat(rank);
  // Counters wrap; a peer is at most one meeting ahead.
  const auto isThere = [&] { return static_cast<int32_t>(peer.arrived.load(std::memory_order_acquire) - round_) >= 0; };
  const auto sleepAt = Clock::now() + (isCrowded_ ? kSpinTimeWhenCrowded : kSpinTime);
  do {
    for (int look = 0; look < kLooksPerClock; ++look) {
      if (isThere()) return;
      relax();
    }
    // A peer that was last on this core may be waiting for it: spinning would keep it away.
    if (peer.core.load(std::memory_order_relaxed) == ::sched_getcpu()) std::this_thread::yield();
  } while (Clock::now() < sleepAt);
  while (!isThere()) {
    sleepOn(peer, peer.arrived.load());
    if (isThere()) return;
    try {
      checkPeers(rank);
    } catch (const c10::DistNetworkError&) {
      // All may have arrived and gone on to their end in between: whoever leaves has seen all arrive.
      if (isThere()) return;
      throw;
    }
    if (Clock::now() >= deadline) fail(names_[rank] + " has not arrived in time");
  }
}

void MeetingRoom::sleepOn(Seat& peer, uint32_t seen) const {
  if (static_cast<int32_t>(seen - round_) >= 0) return;
  const timespec limit{.tv_sec = 0, .tv_nsec = kSleepNanoseconds};
  peer.sleepers.fetch_add(1);
  // The kernel looks at the counter once more: an arrival in between is not missed.
  futex(peer.arrived, FUTEX_WAIT, seen, &limit);
  peer.sleepers.fetch_sub(1);
}

void MeetingRoom::checkPeers(int awaited) {
  // What differs first: who has ended or left may have done so because of it. A death next, for the same reason.
  for (int other = 0; other < size(); ++other) {
    if (other != rank_) checkAnnouncedProgram(other);
  }
  checkAlive(awaited);
  for (int look = 0; look < std::min(kRanksPerLook, size()); ++look) {
    lookedAt_ = (lookedAt_ + 1) % size();
    if (lookedAt_ != rank_) checkAlive(lookedAt_);
  }
  for (int other = 0; other < size(); ++other) {
    if (seat(other).hasGivenUp == 0) continue;
    BAGUA_THROW(PeerLeftError, "Connection closed by peer: ", names_[other],
                " has left the exchange in shared memory, after an error or because its process group was destroyed, "
                "while this rank waited for ",
                names_[awaited]);
  }
}

void MeetingRoom::checkAlive(int rank) const {
  const int32_t process = seat(rank).process;
  // A rank that leaves in order says so before its lock goes. 0: it has not come yet.
  if (process != 0 && !segment_.isTaken(rank) && seat(rank).hasGivenUp == 0) {
    BAGUA_THROW(PeerDiedError, "Connection closed by peer: the process of ", names_[rank], " (", process,
                ") has ended");
  }
}

void MeetingRoom::checkSameProgram(int rank) const {
  const Seat& peer = seat(rank);
  if (peer.program[round_ % 2].load(std::memory_order_relaxed) == programHash_) return;
  compare(peer.announcement.read().value_or(ProgramFingerprint{}), rank);
}

// With programs of other numbers there is nothing to compare: one of the two is late, or needs nothing of the other.
void MeetingRoom::checkAnnouncedProgram(int rank) const {
  const auto theirs = seat(rank).announcement.read();
  if (theirs && theirs->sequence == program_.sequence) compare(*theirs, rank);
}

void MeetingRoom::compare(const ProgramFingerprint& theirs, int rank) const {
  if (rank_ < rank) {
    bagua::checkSameProgram(program_, names_[rank_], theirs, names_[rank]);
  } else {
    bagua::checkSameProgram(theirs, names_[rank], program_, names_[rank_]);
  }
}

void MeetingRoom::fail(const std::string& reason) {
  abort();
  C10_THROW_ERROR(DistNetworkError, reason);
}

void MeetingRoom::abort() {
  if (!segment_.isOpen()) return;
  seat(rank_).hasGivenUp = 1;
  for (int rank = 0; rank < size(); ++rank) futex(seat(rank).arrived, FUTEX_WAKE, INT_MAX, nullptr);
}

}  // namespace bagua
