// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "backend/cpu/collectives/cpu_communicator.h"
#include "backend/cpu/collectives/reduction.h"
#include "backend/operation/tensor_bytes.h"
#include "backend/os/scratch_memory.h"

namespace bagua {

void CpuCommunicator::reduceScatter(at::Tensor& output, const at::Tensor& input, const ReduceOp& op) {
  if (output.numel() == 0) return moveNothing();
  connect();
  const at::Tensor prepared = reduction::prepare(flatOf(input), op);
  at::Tensor result = flatOf(output);
  const bool isInTwoSteps = hosts().maxRanksPerHost() > 1 && !connections_.isOneHost();
  const auto steps = isInTwoSteps ? reduction::inTwoSteps(op, result.scalar_type()) : reduction::TwoSteps{op, op};
  const auto parts = partsOfMembers();
  const auto& own = parts[hosts().localRank(rank())];
  const auto reduced = reducePartsInHost(prepared, result.numel(), parts, steps.first);
  if (connections_.isOneHost() && sharedMemory()) {
    result.copy_(reduced.front());
    return;
  }
  Exchanges exchanges;
  for (size_t index = 1; index < own.size(); ++index) {
    exchanges.push_back({own[index], bytesOf(reduced[index]), Wire::nothing()});
  }
  std::vector<const void*> copies;
  for (int host = 0; host < hosts().hostCount(); ++host) {
    if (host == connections_.ownHost()) {
      copies.push_back(reduced.front().const_data_ptr());
    } else {
      const int partner = connections_.partnerOn(host, rank());
      exchanges.push_back({partner, Wire::nothing(), scratchTensor({result.numel() * itemSize(result)}, at::kByte)});
      copies.push_back(exchanges.back().received.const_data_ptr());
    }
  }
  exchange(exchanges);
  reduction::reduceHosts(copies, steps.second, size(), result);
}

std::vector<at::Tensor> CpuCommunicator::reducePartsInHost(const at::Tensor& prepared, int64_t length,
                                                           const PartsOfMembers& parts, const ReduceOp& op) {
  // Where other hosts divide before they hand on, so does a rank that is alone on its host.
  const bool isDivided = !sharedMemory() && hosts().maxRanksPerHost() > 1 && op == ReduceOp::AVG;
  std::vector<at::Tensor> reduced;
  for (const int part : parts[hosts().localRank(rank())]) {
    const at::Tensor own = prepared.narrow(0, part * length, length);
    reduced.push_back(sharedMemory() || isDivided ? scratchLike(own) : own);
    if (isDivided) reduction::reduceParts({own.const_data_ptr()}, op, size(), reduced.back());
  }
  if (sharedMemory()) reducePartsInMemory(reduced, prepared, parts, op);
  return reduced;
}

void CpuCommunicator::reducePartsInMemory(std::vector<at::Tensor>& reduced, const at::Tensor& prepared,
                                          const PartsOfMembers& parts, const ReduceOp& op) {
  const auto turns = spansInTurns(parts, reduced.front().numel());
  for (size_t turn = 0; turn < turns.size(); ++turn) {
    const auto& spans = turns[turn];
    int64_t shown = -spans[sharedMemory()->rank()].length;
    for (const auto& span : spans) shown += span.length;
    countShown(shown * itemSize(prepared));
    at::Tensor target = turn < reduced.size() ? reduced[turn] : reduced.front().narrow(0, 0, 0);
    sharedMemory()->reduceSpans(target, prepared, spans, op, size(), deadline());
  }
}

}  // namespace bagua
