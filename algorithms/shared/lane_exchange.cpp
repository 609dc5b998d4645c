// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/lane_exchange.h"

#include <ATen/ops/cat.h>
#include <c10/util/Exception.h>

#include <numeric>

#include "backend/os/scratch_memory.h"

namespace bagua {

std::vector<std::vector<at::Tensor>> exchangeLanes(const std::vector<at::Tensor>& messages,
                                                   const std::vector<int>& partners, const HostLanes& lanes,
                                                   Communicator& communicator) {
  const int first = lanes.firstLane(communicator.rank());
  const auto count = static_cast<int>(messages.size());
  // Every rank owns a lane, see HostLanes.
  TORCH_INTERNAL_ASSERT(count == lanes.endLane(communicator.rank()) - first && count > 0 && !partners.empty());
  // Both sides order what they exchange by lane: two ranks never share a lane through more than one pair of hosts.
  std::vector<at::Tensor> sent;
  Communicator::Splits splits(communicator.size(), 0);
  for (int peer = 0; peer < communicator.size(); ++peer) {
    for (int lane = 0; lane < count; ++lane) {
      for (const int host : partners) {
        if (lanes.owner(host, first + lane) != peer) continue;
        sent.push_back(messages[lane]);
        splits[peer] += messages[lane].numel();
      }
    }
  }
  at::Tensor outgoing =
      scratchTensor({std::accumulate(splits.begin(), splits.end(), int64_t{0})}, sent.front().options());
  at::cat_out(outgoing, sent);
  at::Tensor incoming = scratchLike(outgoing);
  communicator.allToAll(incoming, outgoing, splits, splits);

  std::vector<std::vector<at::Tensor>> received(count, std::vector<at::Tensor>(partners.size()));
  int64_t begin = 0;
  for (int peer = 0; peer < communicator.size(); ++peer) {
    for (int lane = 0; lane < count; ++lane) {
      for (size_t partner = 0; partner < partners.size(); ++partner) {
        if (lanes.owner(partners[partner], first + lane) != peer) continue;
        received[lane][partner] = incoming.narrow(0, begin, messages[lane].numel());
        begin += messages[lane].numel();
      }
    }
  }
  return received;
}

}  // namespace bagua
