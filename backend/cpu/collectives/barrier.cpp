// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "backend/cpu/collectives/cpu_communicator.h"
#include "backend/cpu/collectives/line_proposals.h"

namespace bagua {
namespace {

// A sleep lasts some 50 us longer than it is told to.
constexpr std::chrono::milliseconds kWorthSleeping{1};

}  // namespace

void CpuCommunicator::barrier() {
  if (size() == 1) return;
  connect();
  if (sharedMemory()) sharedMemory()->barrier(deadline());
  if (connections_.isOneHost()) return;
  if (rank() == connections_.members().front()) {
    std::vector<int> leaders;
    for (int host = 0; host < hosts().hostCount(); ++host) leaders.push_back(hosts().ranksOf(host).front());
    auto& agreed = lines_[leaders];
    among(std::move(leaders)).meet(agreed, lines(), deadline());
  }
  if (sharedMemory()) sharedMemory()->barrier(deadline());
}

void PartOwners::meet(AgreedLine& agreed, const LineTo& lineTo, Wire::Deadline deadline) const {
  const auto begin = std::chrono::steady_clock::now();
  at::Tensor byte = at::zeros({1}, at::kByte);
  const int rounds = agreed.roundsFor(halves_);
  const AgreedLine::Way way{.rounds = rounds};
  reduceAndAgree(way, agreed, lineTo,
                 [&](LineProposals& proposals) { allReduceInRounds(byte, ReduceOp::MAX, rounds, proposals); });
  std::chrono::microseconds delay{0};
  for (const auto& line : linesOf(way, lineTo)) delay = std::max(delay, line.delay);
  if (rounds * delay < kWorthSleeping) return;
  std::this_thread::sleep_until(std::min(begin + rounds * delay, deadline));
}

}  // namespace bagua
