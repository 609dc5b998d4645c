// SPDX-License-Identifier: Apache-2.0
#include <iterator>
#include <utility>

#include "backend/cpu/collectives/cpu_communicator.h"
#include "backend/cpu/collectives/reduction.h"
#include "backend/cpu/collectives/refilled_memory.h"
#include "backend/operation/tensor_bytes.h"
#include "backend/os/scratch_memory.h"

namespace bagua {

void CpuCommunicator::reduce(at::Tensor& tensor, int root, const ReduceOp& op) {
  if (tensor.numel() == 0) return moveNothing();
  connect();
  at::Tensor flat = flatOf(tensor);
  const at::Tensor prepared = reduction::prepare(flat, op);
  if (connections_.isOneHost() && sharedMemory()) {
    if (rank() != root) countShown(static_cast<int64_t>(flat.nbytes()));
    return sharedMemory()->reduce(flat, prepared, hosts().localRank(root), op, deadline());
  }
  const HostLanes lanes(hosts(), rank(), flat.numel());
  // Only the root's own tensor may change.
  at::Tensor result = rank() == root ? flat : scratchLike(flat);
  const ReduceOp betweenHosts = reduceToOwnLanes(result, prepared, lanes, op);
  const int host = hosts().hostOf(root);
  for (int lane = lanes.firstLane(rank()); lane < lanes.endLane(rank()); ++lane) {
    at::Tensor own = result.narrow(0, lanes.begin(lane), lanes.length(lane));
    auto owners = lanes.owners(lane);
    const auto& agreed = lines_[owners];
    among(std::move(owners)).reduceTo(host, own, betweenHosts, agreed);
  }
  if (connections_.ownHost() == host && sharedMemory()) gatherParts(result, lanes.partsInHost());
}

void PartOwners::reduceTo(int host, at::Tensor& flat, const ReduceOp& op, const AgreedLine& agreed) const {
  if (count() > reduction::kMostInOrder) {
    const auto bytes = static_cast<int64_t>(flat.nbytes());
    const auto way =
        agreed.wayToReduce(halves_, bytes, flat.numel() * reduction::wideItemSize(flat), /*isDivisible=*/false);
    return reduceInRounds(host, flat, op, way.rounds);
  }
  const at::Tensor sent = bytesOf(flat);
  if (host != ownHost_) return exchange({{ranks_[host], sent, Wire::nothing()}});
  const auto reduction = reductionOfAll(flat, op, sent.numel());
  Wire::Exchanges exchanges;
  for (int from = 0; from < count(); ++from) {
    if (from != ownHost_) exchanges.push_back(reduction.scratch[from]->from(ranks_[from], Wire::nothing()));
  }
  exchangeAndReduce(exchanges, reduction);
}

// From the innermost round to the outermost: who has what a part has hands it to the one that is to have its range's.
void PartOwners::reduceInRounds(int host, at::Tensor& flat, const ReduceOp& op, int rounds) const {
  const auto turns = turnsAround(host, rounds);
  at::Tensor values = rounds > 1 ? reduction::widened(flat) : flat;
  const at::Tensor bytes = bytesOf(values);
  for (auto turn = turns.rbegin(); turn != turns.rend(); ++turn) {
    const auto& [hub, peers, spoke, ownPart] = *turn;
    if (ownHost_ == hub) {
      // The mean is taken of all, at the end.
      const bool isLast = std::next(turn) == turns.rend();
      const ReduceOp step = op == ReduceOp::AVG && !isLast ? ReduceOp(ReduceOp::SUM) : op;
      const auto reduction =
          reductionInto(values, step, peers.heard, peers.ownPart, bytes.numel(), &reduction::reduceHalves);
      Wire::Exchanges exchanges;
      for (const int part : peers.otherParts()) {
        exchanges.push_back(reduction.scratch[part]->from(ranks_[peers.heard[part]], Wire::nothing()));
      }
      exchangeAndReduce(exchanges, reduction);
    } else if (ownHost_ == spoke) {
      exchange({{ranks_[hub], bytes, Wire::nothing()}});
    }
  }
  if (ownHost_ == host && !values.is_same(flat)) flat.copy_(values);
}

}  // namespace bagua
