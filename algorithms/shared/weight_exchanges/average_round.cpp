// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/weight_exchanges/average_round.h"

#include <ATen/ops/full.h>

#include <algorithm>
#include <utility>

#include "algorithms/shared/weights.h"
#include "kernels/device_ways.h"

namespace bagua {

std::shared_ptr<AverageRound::Outcome> AverageRound::begin(const std::vector<at::Tensor>& snapshots, bool wantsToEnd) {
  auto outcome = std::make_shared<Outcome>();
  outcome->isLast = at::full({1}, wantsToEnd ? 1 : 0, snapshots[0].options().dtype(at::kByte));
  for (const auto& snapshot : snapshots) outcome->averages.push_back(snapshot.clone());
  return outcome;
}

AverageRound::AverageRound(std::vector<at::Tensor> snapshots, bool wantsToEnd, const Submit& submit)
    : snapshots_(std::move(snapshots)),
      wantsToEnd_(wantsToEnd),
      outcome_(begin(snapshots_, wantsToEnd)),
      work_(submit(outcome_->averages, [outcome = outcome_](Communicator& communicator, StageSeconds& seconds) {
        const Stage stage(seconds, stages::kAverageWeights);
        communicator.allReduce(outcome->isLast, c10d::ReduceOp::MIN);
        for (auto& flat : outcome->averages) communicator.allReduce(flat, c10d::ReduceOp::AVG);
        outcome->end = Clock::now().time_since_epoch().count();
      })) {}

bool AverageRound::wait(Clock::time_point deadline) const {
  using std::chrono::milliseconds;
  if (deadline == Clock::time_point::max()) {
    work_->wait(kNoTimeout);
  } else {
    const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
    work_->wait(std::max(left, milliseconds(1)));
  }
  return wantsToEnd_ && outcome_->isLast.item<uint8_t>() != 0;
}

at::Tensor AverageRound::takeChange(size_t snapshot) {
  const at::Tensor average = std::move(outcome_->averages[snapshot]);
  return average.to(computeTypeOf(average.scalar_type())).sub_(snapshots_[snapshot]);
}

AverageRound::Clock::time_point AverageRound::end() const {
  return worksOnCpu(snapshots_[0]) ? Clock::time_point(Clock::duration(outcome_->end)) : Clock::now();
}

}  // namespace bagua
