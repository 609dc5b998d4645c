// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <vector>

#include "backend/cpu/messages.h"

namespace bagua {

// torch.distributed.monitored_barrier: rank 0 hears every other rank and answers it, and says which have not come, the
// first or, with `waitAllRanks`, all. On the calling thread. Every rank has another finding to report, of which none is
// to end the operations of the others: these messages are no operations.
//
// A barrier is known by the programs before it and by how many barriers there were since the last of them. So the group
// stays in step after rank 0 has given one up: a rank that comes late to it is told so at once, and one that has never
// called it meets rank 0 at the next barrier after another program. Without a program in between it cannot be told from
// one that comes late.
class MonitoredBarrier {
 public:
  MonitoredBarrier(Messages* messages, int rank, int size) : messages_(messages), rank_(rank), size_(size) {}

  void pass(uint64_t programs, std::chrono::milliseconds timeout, bool waitAllRanks);

 private:
  using Clock = std::chrono::steady_clock;
  struct Limit {
    std::chrono::milliseconds timeout;
    Clock::time_point end;
  };
  void attend(uint64_t number, const Limit& limit);
  void hearAll(uint64_t number, const Limit& limit, bool waitAllRanks);
  // To all ranks, whether they have come or not: rank 0 waits no longer for those that are missing.
  void tellGivenUp(uint64_t number, const std::vector<int>& missing);

  // Null: the group has no messages.
  Messages* const messages_;
  const int rank_;
  const int size_;
  std::mutex mutex_;
  uint64_t programs_ = 0;
  // Barriers since then that this rank has begun.
  uint64_t begun_ = 0;
};

}  // namespace bagua
