// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "backend/cpu/collectives/agreed_line.h"
#include "backend/cpu/collectives/halves.h"
#include "backend/cpu/wire.h"
#include "backend/torch_compat.h"

namespace bagua {

class EqualParts;
class LineProposals;
class RefilledMemory;

// The ranks that deal with the same part of a tensor, one on each host, and the steps that they take over the network.
// Inside a host nothing happens here. What a collective does is in that collective's source. Every one of them makes
// the same calls with the same sizes. Tensors are flat.
class PartOwners {
 public:
  using ReduceOp = c10d::ReduceOp;
  // See Wire::exchangeInPieces.
  using ExchangeInPieces =
      std::function<void(const Wire::Exchanges& exchanges, const Pipeline& pipeline, const Wire::Exchanges& forwarded)>;
  using LineTo = std::function<Wire::Line(int peer)>;

  // `ranks` in the order of hosts, this rank on `ownHost`. AVG divides by `contributors`: what an owner brings may be
  // the sum of several.
  PartOwners(std::vector<int> ranks, int ownHost, int64_t contributors, ExchangeInPieces exchange);

  // In place, of what each owner holds (see reduction::reduceHosts). `agreed` is that of these owners.
  void allReduce(at::Tensor& flat, const ReduceOp& op, AgreedLine& agreed, const LineTo& lineTo) const;
  // Returns when all owners have come, on all at the same time: whoever comes last stays until the others know.
  void meet(AgreedLine& agreed, const LineTo& lineTo, Wire::Deadline deadline) const;
  // In place on the owner that is on `host`; what the others have in `flat` is used up.
  void reduceTo(int host, at::Tensor& flat, const ReduceOp& op, const AgreedLine& agreed) const;
  // From the owner that is on `host`.
  void broadcastFrom(int host, at::Tensor& bytes, const AgreedLine& agreed) const;
  // `bytes` holds, by owner, what each has; this one's is there.
  void gather(at::Tensor& bytes, const AgreedLine& agreed) const;

 private:
  [[nodiscard]] int count() const { return static_cast<int>(ranks_.size()); }
  // The other hosts in turn, so that not all send to the same one first.
  [[nodiscard]] std::vector<int> others() const;
  void exchange(const Wire::Exchanges& exchanges, const Pipeline& pipeline = {},
                const Wire::Exchanges& forwarded = {}) const {
    exchange_(exchanges, pipeline, forwarded);
  }
  // What comes from some of the others, and the step of a pipeline that reduces it with `flat`.
  struct Reduction {
    // By source; null for what this owner has, and where there is none.
    std::vector<std::shared_ptr<RefilledMemory>> scratch;
    Pipeline::Step step;
  };
  using Reduce = void (*)(const std::vector<const void*>& parts, const ReduceOp& op, int64_t contributors,
                          const at::Tensor& output);
  // `peers` by source: negative where there is none, or at `own`. `flat` stands for this owner's.
  [[nodiscard]] Reduction reductionInto(const at::Tensor& flat, const ReduceOp& op, const std::vector<int>& peers,
                                        int own, int64_t incoming, Reduce reduce) const;
  // Reduces what the exchanges bring as it comes.
  void exchangeAndReduce(const Wire::Exchanges& exchanges, const Reduction& reduction) const {
    exchange(exchanges, {.beforeSending = {}, .afterReceiving = reduction.step});
  }
  // Of what all others send, in the order of hosts.
  [[nodiscard]] Reduction reductionOfAll(const at::Tensor& flat, const ReduceOp& op, int64_t incoming) const;

  void allReduceInOrder(at::Tensor& flat, const ReduceOp& op, LineProposals& proposals) const;
  void allReduceInRounds(at::Tensor& flat, const ReduceOp& op, int rounds, LineProposals& proposals) const;
  void allReduceInParts(at::Tensor& flat, const ReduceOp& op, LineProposals& proposals) const;
  void allReducePartsInRounds(at::Tensor& flat, const ReduceOp& op, int rounds, LineProposals& proposals) const;
  // Where two owners do the work of one: the second hands what it has to the first, and has the result of it.
  struct Pair {
    int place;
    // Of this owner; negative: there is none.
    int first = -1;
    int second = -1;
  };
  [[nodiscard]] Pair ownPair() const;
  // The innermost round first; empty for the second of a pair.
  [[nodiscard]] std::vector<Halves::Peers> peersOfPairs(int rounds) const;
  // In one of the rounds, this owner's part becomes what its peers have of it.
  void reducePart(const EqualParts& parts, const ReduceOp& op, const Halves::Peers& peers,
                  LineProposals& proposals) const;
  // In one of the rounds, `flat` becomes what its parts have of it.
  void takeRound(at::Tensor& flat, const ReduceOp& op, const Halves::Peers& peers, LineProposals& proposals) const;
  // Has the owners agree on their lines in the same messages, where that is due.
  void reduceAndAgree(const AgreedLine::Way& way, AgreedLine& agreed, const LineTo& lineTo,
                      const std::function<void(LineProposals&)>& reduce) const;
  // The innermost first.
  [[nodiscard]] std::vector<Halves::Peers> peersOfRounds(int rounds) const;
  // Of all with whom this owner speaks.
  [[nodiscard]] std::vector<Wire::Line> linesOf(const AgreedLine::Way& way, const LineTo& lineTo) const;
  void reduceInRounds(int host, at::Tensor& flat, const ReduceOp& op, int rounds) const;
  // Of a round in which one owner of each part of a range speaks with the one that has, or gets, all of it.
  struct Turn {
    // The one, as a peer of which the others are listed, and which of them this owner's part has.
    int hub;
    Halves::Peers peers;
    int spoke;
    int ownPart;
  };
  // The outermost round first. Of all rounds `host` is a hub.
  [[nodiscard]] std::vector<Turn> turnsAround(int host, int rounds) const;
  void broadcastWhole(int host, at::Tensor& bytes, int rounds) const;
  void broadcastInParts(int host, at::Tensor& bytes) const;

  const std::vector<int> ranks_;
  const int ownHost_;
  const Halves halves_;
  const int64_t contributors_;
  const ExchangeInPieces exchange_;
};

}  // namespace bagua
