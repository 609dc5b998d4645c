// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "backend/operation/program_fingerprint.h"
#include "backend/os/shared_segment.h"

namespace bagua {

// Memory in which the ranks of a host show each other bytes, in rounds. In a round a rank fills its own slot, calls
// meet(), and may then read the slots of all others until it calls meet() again.
//
// Every rank has two slots, used in turn. When a rank fills a slot that it used two rounds ago, all have met in the
// round between, hence have done with what they read then: no second meeting is needed.
class MeetingRoom {
 public:
  static constexpr int64_t kSlotBytes = int64_t{512} << 10;

  // What the segment of `ranks` ranks takes: their seats, one after another, and then their slots.
  static size_t bytesFor(int ranks);
  static size_t bytesPerSeat();

  // `rank` of `ranks`, in `segment`, which all of them have open. `names[i]` is rank i in error messages.
  MeetingRoom(SharedSegment segment, int rank, std::vector<std::string> names);
  ~MeetingRoom();
  MeetingRoom(const MeetingRoom&) = delete;
  MeetingRoom& operator=(const MeetingRoom&) = delete;

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return static_cast<int>(names_.size()); }
  // Whether there are more ranks than cores.
  [[nodiscard]] bool isCrowded() const { return isCrowded_; }

  // This rank's slot for the coming meeting.
  [[nodiscard]] uint8_t* ownSlot() const { return slot(rank_, round_); }
  // What the coming meetings are for; the others may see it from now on. Ranks that meet for different programs all
  // throw a MismatchError.
  void setProgram(const ProgramFingerprint& program);
  // Returns when all ranks have called it. Throws an error that names who is missing: at the deadline, soon after a
  // process has ended (PeerDiedError), whichever rank's, or when a rank has given up (PeerLeftError). A rank that is
  // in another program of the same number may be waiting elsewhere and never come: soon a MismatchError.
  void meet(std::chrono::steady_clock::time_point deadline);
  // The slot of a rank as of the last meeting.
  [[nodiscard]] const uint8_t* shown(int rank) const { return slot(rank, round_ - 1); }

  // Makes meet() throw on all ranks, in this process at once. From any thread.
  void abort();
  // After all have opened the segment.
  void removeName() { segment_.removeName(); }

 private:
  // Written by one rank, and read by the others at any time.
  class Announcement {
   public:
    void write(const ProgramFingerprint& program);
    // Nothing: there has not been any yet, or it is being written.
    [[nodiscard]] std::optional<ProgramFingerprint> read() const;

   private:
    static constexpr size_t kWords = sizeof(ProgramFingerprint) / sizeof(uint64_t);
    static_assert(kWords * sizeof(uint64_t) == sizeof(ProgramFingerprint));
    // 0 before the first; odd while the words change.
    std::atomic<uint64_t> version_;
    std::array<std::atomic<uint64_t>, kWords> words_;
  };
  // One per rank, in a cache line of its own. A change raises kWireFormat (rendezvous/wire_format.h).
  struct alignas(128) Seat {
    // How many meetings the rank has come to; also what others sleep on.
    std::atomic<uint32_t> arrived;
    std::atomic<uint32_t> sleepers;
    std::atomic<uint32_t> hasGivenUp;
    // For those who read an error; in the rank's own pid namespace.
    std::atomic<int32_t> process;
    // The core on which the rank was when it last arrived.
    std::atomic<int32_t> core;
    // What the rank has come for, with two meetings in turn, as the slots.
    std::array<std::atomic<uint64_t>, 2> program;
    // What the rank is in, come or not. Away from what others look at all the time: nobody reads it in a meeting to
    // which all come soon.
    alignas(128) Announcement announcement;
  };

  [[nodiscard]] Seat& seat(int rank) const { return reinterpret_cast<Seat*>(segment_.data())[rank]; }
  [[nodiscard]] uint8_t* slot(int rank, uint32_t round) const;
  void arrive();
  void waitFor(int rank, std::chrono::steady_clock::time_point deadline);
  // Sleeps until the rank arrives, for a short while at most.
  void sleepOn(Seat& peer, uint32_t seen) const;
  // Throws if a rank is in another program, has died or left, whichever it is: the one that is awaited may only be slow
  // because of that, or for reasons of its own.
  void checkPeers(int awaited);
  void checkAlive(int rank) const;
  // Of a rank that has arrived.
  void checkSameProgram(int rank) const;
  // Of one that may not come.
  void checkAnnouncedProgram(int rank) const;
  void compare(const ProgramFingerprint& theirs, int rank) const;
  [[noreturn]] void fail(const std::string& reason);

  SharedSegment segment_;
  const int rank_;
  const std::vector<std::string> names_;
  const bool isCrowded_;
  int lookedAt_ = 0;
  // Meetings so far.
  uint32_t round_ = 0;
  ProgramFingerprint program_;
  uint64_t programHash_ = 0;
};

}  // namespace bagua
