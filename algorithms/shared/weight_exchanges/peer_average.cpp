// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/weight_exchanges/peer_average.h"

#include <c10/util/Exception.h>

#include <vector>

#include "algorithms/shared/lane_exchange.h"

namespace bagua {
namespace {

void averagePairs(const HostTopology& topology, at::Tensor& flat, int64_t exchange, StageSeconds& seconds,
                  Communicator& communicator) {
  const int rank = communicator.rank();
  const HostLanes lanes(topology, rank, flat.numel());
  if (lanes.count() > 1) {
    const Stage stage(seconds, stages::kReduceInHost);
    communicator.reduceScatterInHost(flat, lanes.partsInHost(), lanes.localSize());
  }
  {
    const Stage stage(seconds, stages::kExchange);
    std::vector<at::Tensor> own;
    for (int lane = lanes.firstLane(rank); lane < lanes.endLane(rank); ++lane) {
      own.push_back(flat.narrow(0, lanes.begin(lane), lanes.length(lane)));
    }
    const int peer = shiftOnePeer(exchange, lanes.ownHost(), lanes.hostCount());
    const auto received = exchangeLanes(own, {peer}, lanes, communicator);
    for (size_t lane = 0; lane < own.size(); ++lane) own[lane].add_(received[lane][0]).div_(2);
  }
  if (lanes.count() > 1) {
    const Stage stage(seconds, stages::kGatherInHost);
    communicator.allGatherInHost(flat, lanes.partsInHost());
  }
}

}  // namespace

int shiftOnePeer(int64_t exchange, int participant, int count) {
  const int half = count / 2;
  const int shift = static_cast<int>(exchange % half);
  if (participant < half) return (shift + participant) % half + half;
  return (participant - half - shift + half) % half;
}

PeerAverage::PeerAverage(bool hierarchical, const std::string& mode)
    : hierarchical_(hierarchical), pairs_(mode == "shift_one") {
  TORCH_CHECK_VALUE(pairs_ || mode == "all", "bagua: peer_selection_mode is 'all' or 'shift_one', got '", mode, "'");
}

void PeerAverage::check(const HostTopology& topology) const {
  if (!pairs_ || topology.size() == 1) return;
  const bool areHosts = hierarchical_ && topology.hostCount() > 1;
  const int participants = areHosts ? topology.hostCount() : topology.size();
  TORCH_CHECK_VALUE(participants % 2 == 0, "bagua: peer_selection_mode 'shift_one' pairs the ",
                    areHosts ? "hosts (hierarchical=True)" : "ranks", " and needs an even number of them, got ",
                    participants, "; use peer_selection_mode='all'");
}

void PeerAverage::reduce(at::Tensor& flat, int64_t exchange, StageSeconds& seconds, Communicator& communicator) const {
  if (communicator.size() == 1) return;
  if (pairs_ && !hierarchical_) {
    averagePairs(HostTopology::oneRankPerHost(communicator.size()), flat, exchange, seconds, communicator);
  } else if (pairs_ && communicator.topology().hostCount() > 1) {
    averagePairs(communicator.topology(), flat, exchange, seconds, communicator);
  } else {
    const Stage stage(seconds, stages::kAllReduce);
    communicator.allReduce(flat, c10d::ReduceOp::AVG);
  }
}

}  // namespace bagua
