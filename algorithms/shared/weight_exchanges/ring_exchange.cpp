// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/weight_exchanges/ring_exchange.h"

#include <ATen/ops/cat.h>

#include <algorithm>

#include "algorithms/shared/cache_blocks.h"
#include "algorithms/shared/lane_exchange.h"
#include "backend/os/scratch_memory.h"
#include "kernels/device_ways.h"

namespace bagua {
namespace {

at::ScalarType computeType(const at::Tensor& weights) {
  return weights.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

at::Tensor compress(const Codec& codec, const Encoding& encoding, const at::Tensor& values) {
  at::Tensor packed = scratchTensor({codec.layout().packedBytes(values.numel())}, values.options().dtype(at::kByte));
  codec.start(values, encoding, packed);
  codec.encode(values, {0, values.numel()}, encoding, packed);
  return packed;
}

// weights += what `packed` holds, rounded once to their dtype: the same bits wherever it is done.
void addDecoded(const Codec& codec, const at::Tensor& weights, const at::Tensor& packed) {
  at::Tensor difference = scratchTensor(weights.sizes(), weights.options().dtype(computeType(weights)));
  codec.decodeChunks(packed.unsqueeze(0), weights.numel(), difference);
  weights.add_(difference);
}

bool areOne(const RingReplicas& replicas) { return replicas.left.const_data_ptr() == replicas.right.const_data_ptr(); }

}  // namespace

void RingExchange::enterHost(at::Tensor& flat, StageSeconds& seconds, Communicator& communicator) const {
  if (lanes_.count() == 1) return;
  const Stage stage(seconds, stages::kReduceInHost);
  communicator.reduceScatterInHost(flat, lanes_.partsInHost(), lanes_.localSize());
}

void RingExchange::leaveHost(at::Tensor& flat, StageSeconds& seconds, Communicator& communicator) const {
  if (lanes_.count() == 1) return;
  const Stage stage(seconds, stages::kGatherInHost);
  communicator.allGatherInHost(flat, lanes_.partsInHost());
}

at::Tensor RingExchange::ownPart(const at::Tensor& flat, int rank) const {
  return flat.narrow(0, lanes_.begin(lanes_.firstLane(rank)), lanes_.ownLength(rank));
}

std::vector<at::Tensor> RingExchange::lanesOf(const at::Tensor& own, int rank) const {
  std::vector<at::Tensor> parts;
  const int64_t begin = lanes_.begin(lanes_.firstLane(rank));
  for (int lane = lanes_.firstLane(rank); lane < lanes_.endLane(rank); ++lane) {
    parts.push_back(own.narrow(0, lanes_.begin(lane) - begin, lanes_.length(lane)));
  }
  return parts;
}

std::vector<int> RingExchange::neighbours() const {
  const int hosts = lanes_.hostCount();
  const int left = (lanes_.ownHost() + hosts - 1) % hosts;
  const int right = (lanes_.ownHost() + 1) % hosts;
  if (left == right) return {left};
  return {left, right};
}

bool RingExchange::canGoInPieces(const HostTopology& hosts) const {
  if (!lanes_.isEven()) return false;
  for (int lane = 0; lane < lanes_.count(); ++lane) {
    const auto owners = lanes_.owners(lane);
    for (size_t i = 0; i < owners.size(); ++i) {
      if (hosts.hostOf(owners[i]) == hosts.hostOf(owners[(i + 1) % owners.size()])) return false;
    }
  }
  return true;
}

RingReplicas RingExchange::start(at::Tensor& flat, StageSeconds& seconds, Communicator& communicator) const {
  enterHost(flat, seconds, communicator);
  const int rank = communicator.rank();
  const at::Tensor own = ownPart(flat, rank).clone();
  const Stage stage(seconds, stages::kExchange);
  const auto received = exchangeLanes(lanesOf(own, rank), neighbours(), lanes_, communicator);
  std::vector<at::Tensor> left;
  std::vector<at::Tensor> right;
  for (const auto& lane : received) {
    left.push_back(lane.front());
    right.push_back(lane.back());
  }
  const at::Tensor leftReplica = at::cat(left);
  return {own, leftReplica, hasOneNeighbour() ? leftReplica : at::cat(right)};
}

at::Tensor RingExchange::differenceOf(const at::Tensor& own, const RingReplicas& replicas) {
  const at::Tensor difference = scratchTensor(own.sizes(), own.options().dtype(computeType(own)));
  inBlocks(own.numel(), own.device(), [&](int64_t begin, int64_t length) {
    const auto block = [&](const at::Tensor& tensor) { return tensor.narrow(0, begin, length); };
    block(difference)
        .copy_(block(own))
        .add_(block(replicas.left), 1.0F / 3.0F)
        .add_(block(replicas.right), 1.0F / 3.0F)
        .add_(block(replicas.self), -5.0F / 3.0F);
  });
  return difference;
}

void RingExchange::step(at::Tensor& flat, RingReplicas& replicas, StageSeconds& seconds, Communicator& communicator,
                        const Look& look) const {
  enterHost(flat, seconds, communicator);
  const at::Tensor own = ownPart(flat, communicator.rank());
  at::Tensor difference;
  {
    const Stage stage(seconds, stages::kCompress);
    difference = differenceOf(own, replicas);
  }
  if (look) {
    const Stage stage(seconds, stages::kGuard);
    look(difference, lanes_.begin(lanes_.firstLane(communicator.rank())));
  }
  if (worksOnCpu(flat) && canGoInPieces(communicator.topology())) {
    exchangeInPieces(difference, own, replicas, seconds, communicator);
  } else {
    exchangeWhole(difference, own, replicas, seconds, communicator);
  }
  leaveHost(flat, seconds, communicator);
}

void RingExchange::exchangeWhole(const at::Tensor& difference, const at::Tensor& own, RingReplicas& replicas,
                                 StageSeconds& seconds, Communicator& communicator) const {
  const int rank = communicator.rank();
  std::vector<at::Tensor> packed;
  {
    const Stage stage(seconds, stages::kCompress);
    for (const auto& lane : lanesOf(difference, rank)) packed.push_back(compress(*codec_, encoding_, lane));
  }
  std::vector<std::vector<at::Tensor>> received;
  {
    const Stage stage(seconds, stages::kExchange);
    received = exchangeLanes(packed, neighbours(), lanes_, communicator);
  }
  const Stage stage(seconds, stages::kDecompress);
  const auto self = lanesOf(replicas.self, rank);
  const auto left = lanesOf(replicas.left, rank);
  const auto right = lanesOf(replicas.right, rank);
  for (size_t lane = 0; lane < packed.size(); ++lane) {
    addDecoded(*codec_, self[lane], packed[lane]);
    addDecoded(*codec_, left[lane], received[lane].front());
    if (!areOne(replicas)) addDecoded(*codec_, right[lane], received[lane].back());
  }
  own.copy_(replicas.self);
}

// A piece of `difference` is of no use once it is coded: what is decoded later takes its place.
void RingExchange::exchangeInPieces(at::Tensor& difference, const at::Tensor& own, RingReplicas& replicas,
                                    StageSeconds& seconds, Communicator& communicator) const {
  const int lane = lanes_.firstLane(communicator.rank());
  std::vector<int> peers;
  for (const int host : neighbours()) peers.push_back(lanes_.owner(host, lane));
  const int leftPeer = peers.front();
  const int rightPeer = peers.back();
  // A row for each peer; messages are in the order of ranks.
  std::sort(peers.begin(), peers.end());
  const auto rows = static_cast<int64_t>(peers.size());
  const PackedLayout layout = codec_->layout();
  const int64_t bytes = layout.packedBytes(difference.numel());
  const at::Tensor sent = scratchTensor({rows, bytes}, own.options().dtype(at::kByte));
  const at::Tensor received = scratchLike(sent);
  Communicator::Splits splits(communicator.size(), 0);
  for (const int peer : peers) splits[peer] = bytes;
  const auto rowOf = [&](int peer) { return received[peers.front() == peer ? 0 : 1]; };
  const at::Tensor left = rowOf(leftPeer);
  const at::Tensor right = rowOf(rightPeer);
  at::Tensor packed = sent[0];
  {
    const Stage stage(seconds, stages::kCompress);
    codec_->start(difference, encoding_, packed);
  }
  const auto make = [&](int64_t begin, int64_t end) {
    const Stage stage(seconds, stages::kCompress);
    const Piece piece = layout.begunIn(begin, end, difference.numel());
    if (piece.begin < piece.end) codec_->encode(difference, piece, encoding_, packed);
    for (int64_t row = 1; row < rows; ++row) {
      sent[row].narrow(0, begin, end - begin).copy_(packed.narrow(0, begin, end - begin));
    }
  };
  const auto use = [&](int64_t beginByte, int64_t endByte) {
    const Stage stage(seconds, stages::kDecompress);
    const Piece piece = layout.endedIn(beginByte, endByte, difference.numel());
    const auto useBlock = [&](int64_t begin, int64_t length) {
      const Piece block{piece.begin + begin, piece.begin + begin + length};
      const auto within = [&](const at::Tensor& tensor) { return tensor.narrow(0, block.begin, length); };
      const auto add = [&](const at::Tensor& replica, const at::Tensor& codes) {
        codec_->decode(codes, block, difference);
        within(replica).add_(within(difference));
      };
      add(replicas.self, packed);
      add(replicas.left, left);
      if (!areOne(replicas)) add(replicas.right, right);
      within(own).copy_(within(replicas.self));
    };
    inBlocks(piece.end - piece.begin, own.device(), useBlock, layout.groupElements);
  };
  const Elapsed exchange(seconds, stages::kExchange, {stages::kCompress, stages::kDecompress});
  at::Tensor receivedBytes = received.view({-1});
  communicator.allToAllInPieces(receivedBytes, sent.view({-1}), splits, splits,
                                {.beforeSending = make, .afterReceiving = use});
}

}  // namespace bagua
