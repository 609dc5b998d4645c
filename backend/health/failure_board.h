// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "backend/health/store_pulse.h"

namespace bagua {

// Why a group is unusable: which of its ranks failed first, and what that rank says about it.
struct Failure {
  int rank = 0;
  std::string message;
};

// Where the ranks of a group tell each other, through the store that they met in, what they have no other way to tell
// once a transport has failed: who failed first, and what everybody is doing. Calls block for as long as the store does
// and throw what it throws: for one thread only, which nobody waits for without a limit.
class FailureBoard {
 public:
  // Connects anew: clients of a TCP store must not share a connection.
  FailureBoard(c10d::Store& store, int rank);

  // Changes when there may be something new here: see StorePulse.
  uint64_t beats(std::chrono::milliseconds interval) { return pulse_->beats(*store_, interval); }

  // Reports a failure. Returns the one that was reported first, by whichever rank.
  Failure report(const std::string& message);
  // The failure that was reported first, if any has been.
  std::optional<Failure> firstFailure();

  // A roll call asks every rank what it is doing. Returns its number, from 1 on; nothing where another rank calls the
  // roll at the same time: of many ranks that want to know, one reads the answers of all.
  std::optional<int64_t> callTheRoll();
  // The number of the latest roll call; 0: none so far.
  int64_t latestRollCall();
  void answer(int64_t rollCall, const std::string& text);
  // What the ranks in `missing` have answered by now to this roll call or a later one; they are removed from `missing`.
  std::map<int, std::string> answers(int64_t rollCall, std::vector<int>& missing);

 private:
  Failure announced(Failure failure);

  const std::shared_ptr<StorePulse> pulse_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  int64_t seenRollCall_ = 0;
  // The highest number that this rank has tried to take.
  int64_t triedRollCall_ = 0;
};

}  // namespace bagua
