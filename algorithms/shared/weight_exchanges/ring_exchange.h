// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

#include "algorithms/shared/compressed/coding.h"
#include "algorithms/stage.h"
#include "backend/communicator.h"
#include "backend/topology/host_lanes.h"

namespace bagua {

// What a participant of the ring remembers of one bucket of weights: its own as of the last exchange and its
// neighbours', of which it holds the same bits as they do. Flat tensors of the lanes that this rank owns. Between two
// participants `left` and `right` are the same, and may be one tensor.
struct RingReplicas {
  at::Tensor self;
  at::Tensor left;
  at::Tensor right;
};

// A ring of hosts (of ranks, where each is a host of its own) in which the differences between weights travel with 8
// bits. `topology` says who the participants are; every method is called by all ranks.
class RingExchange {
 public:
  RingExchange(const HostTopology& topology, int rank, int64_t numel, const compressed::Coding& coding = {})
      : lanes_(topology, rank, numel), codec_(coding.codec), encoding_(coding.sender) {}

  // Elements in the replicas of this rank.
  [[nodiscard]] int64_t ownLength(int rank) const { return lanes_.ownLength(rank); }
  [[nodiscard]] bool hasOneNeighbour() const { return neighbours().size() == 1; }
  // Sets the replicas from weights in full precision: the mean over the host of `flat`, and what the neighbours have.
  [[nodiscard]] RingReplicas start(at::Tensor& flat, StageSeconds& seconds, Communicator& communicator) const;

  // With x the weights in `flat` after a local step (the mean over the host):
  //   d = x + left / 3 + right / 3 - 5 / 3 self, coded as one chunk, goes to both neighbours;
  //   self += d, left += d of the left one, right += d of the right one; x = self.
  // `look`, if there is one, is shown d, which is that of the elements of `flat` from `begin` on.
  using Look = std::function<void(const at::Tensor& difference, int64_t begin)>;
  void step(at::Tensor& flat, RingReplicas& replicas, StageSeconds& seconds, Communicator& communicator,
            const Look& look = {}) const;

 private:
  void enterHost(at::Tensor& flat, StageSeconds& seconds, Communicator& communicator) const;
  void leaveHost(at::Tensor& flat, StageSeconds& seconds, Communicator& communicator) const;
  // d above, as a flat tensor of this rank's lanes.
  [[nodiscard]] static at::Tensor differenceOf(const at::Tensor& own, const RingReplicas& replicas);
  // The exchange of `difference` and the update of the replicas and of `own`; all lanes at once, or the single lane of
  // every rank piece by piece.
  void exchangeWhole(const at::Tensor& difference, const at::Tensor& own, RingReplicas& replicas, StageSeconds& seconds,
                     Communicator& communicator) const;
  void exchangeInPieces(at::Tensor& difference, const at::Tensor& own, RingReplicas& replicas, StageSeconds& seconds,
                        Communicator& communicator) const;
  [[nodiscard]] at::Tensor ownPart(const at::Tensor& flat, int rank) const;
  // One tensor per owned lane.
  [[nodiscard]] std::vector<at::Tensor> lanesOf(const at::Tensor& own, int rank) const;
  // Whether every rank owns one lane, and nobody's neighbour in the ring is on its own host: the same on all ranks.
  [[nodiscard]] bool canGoInPieces(const HostTopology& hosts) const;
  // {left, right}, or the one other host.
  [[nodiscard]] std::vector<int> neighbours() const;

  const HostLanes lanes_;
  const std::shared_ptr<const Codec> codec_;
  const Encoding encoding_;
};

}  // namespace bagua
