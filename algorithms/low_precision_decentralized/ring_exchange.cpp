// SPDX-License-Identifier: Apache-2.0
#include "algorithms/low_precision_decentralized/ring_exchange.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include "algorithms/blocks.h"
#include "algorithms/in_host.h"
#include "kernels/minmax_uint8/minmax_uint8.h"

namespace bagua {
namespace {

at::ScalarType computeType(const at::Tensor& weights) {
  return weights.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

at::Tensor compress(const at::Tensor& values) {
  at::Tensor packed = at::empty({minmax_uint8::packedBytes(values.numel(), 1)}, values.options().dtype(at::kByte));
  minmax_uint8::compress(values, 1, packed);
  return packed;
}

// weights += what `packed` holds, rounded once to their dtype: the same bits wherever it is done.
void addDecoded(const at::Tensor& weights, const at::Tensor& packed) {
  at::Tensor difference = at::empty(weights.sizes(), weights.options().dtype(computeType(weights)));
  minmax_uint8::decompress(packed, 1, difference);
  weights.add_(difference);
}

}  // namespace

void RingExchange::enterHost(at::Tensor& flat, StageSeconds& seconds, Communicator& communicator) const {
  if (lanes_.count() == 1) return;
  const Stage stage(seconds, "reduce_in_host");
  reduceInHost(flat, lanes_, static_cast<float>(lanes_.localSize()), communicator);
}

void RingExchange::leaveHost(at::Tensor& flat, StageSeconds& seconds, Communicator& communicator) const {
  if (lanes_.count() == 1) return;
  const Stage stage(seconds, "gather_in_host");
  gatherInHost(flat, lanes_, communicator);
}

at::Tensor RingExchange::ownPart(const at::Tensor& flat, int rank) const {
  return flat.narrow(0, lanes_.begin(lanes_.firstLane(rank)), lanes_.ownLength(rank));
}

RingReplicas RingExchange::ownPartOf(const RingReplicas& whole, int rank) const {
  return {ownPart(whole.self, rank), ownPart(whole.left, rank), ownPart(whole.right, rank)};
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

RingReplicas RingExchange::start(at::Tensor& flat, StageSeconds& seconds, Communicator& communicator) const {
  enterHost(flat, seconds, communicator);
  const int rank = communicator.rank();
  const at::Tensor own = ownPart(flat, rank).clone();
  const Stage stage(seconds, "exchange");
  const auto received = swapLanes(lanesOf(own, rank), neighbours(), lanes_, communicator);
  std::vector<at::Tensor> left;
  std::vector<at::Tensor> right;
  for (const auto& lane : received) {
    left.push_back(lane.front());
    right.push_back(lane.back());
  }
  return {own, at::cat(left), at::cat(right)};
}

void RingExchange::step(at::Tensor& flat, RingReplicas& replicas, StageSeconds& seconds,
                        Communicator& communicator) const {
  enterHost(flat, seconds, communicator);
  const int rank = communicator.rank();
  const at::Tensor own = ownPart(flat, rank);
  std::vector<at::Tensor> packed;
  {
    const Stage stage(seconds, "compress");
    const auto type = computeType(flat);
    const at::Tensor difference = at::empty(own.sizes(), own.options().dtype(type));
    inBlocks(own.numel(), own.device(), [&](int64_t begin, int64_t length) {
      const auto block = [&](const at::Tensor& tensor) { return tensor.narrow(0, begin, length); };
      block(difference)
          .copy_(block(own))
          .add_(block(replicas.left), 1.0F / 3.0F)
          .add_(block(replicas.right), 1.0F / 3.0F)
          .add_(block(replicas.self), -5.0F / 3.0F);
    });
    for (const auto& lane : lanesOf(difference, rank)) packed.push_back(compress(lane));
  }
  std::vector<std::vector<at::Tensor>> received;
  {
    const Stage stage(seconds, "exchange");
    received = swapLanes(packed, neighbours(), lanes_, communicator);
  }
  {
    const Stage stage(seconds, "decompress");
    const auto self = lanesOf(replicas.self, rank);
    const auto left = lanesOf(replicas.left, rank);
    const auto right = lanesOf(replicas.right, rank);
    for (size_t lane = 0; lane < packed.size(); ++lane) {
      addDecoded(self[lane], packed[lane]);
      addDecoded(left[lane], received[lane].front());
      addDecoded(right[lane], received[lane].back());
    }
    own.copy_(replicas.self);
  }
  leaveHost(flat, seconds, communicator);
}

}  // namespace bagua
