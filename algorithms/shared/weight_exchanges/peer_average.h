// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "algorithms/stage.h"
#include "backend/communicator.h"

namespace bagua {

// Whom `participant` of `count` (an even number) meets in exchange number `exchange`: the first half meets the second
// half, shifted by one from exchange to exchange. peer(peer(p)) == p.
int shiftOnePeer(int64_t exchange, int participant, int count);

// An average in full precision, over all participants or over pairs of them.
class PeerAverage {
 public:
  // `mode` is "all" or "shift_one", else ValueError. `hierarchical`: hosts are the participants, each with the mean of
  // its ranks; on a single host that mean is all there is.
  PeerAverage(bool hierarchical, const std::string& mode);

  // Whether the participants meet in pairs, others in every exchange.
  [[nodiscard]] bool pairs() const { return pairs_; }

  // Throws ValueError unless the participants can be paired where they have to be. An odd number of ranks on a single
  // host is refused as well, for the user has asked for pairs.
  void check(const HostTopology& topology) const;

  // Replaces `flat` by the average in exchange number `exchange`.
  void reduce(at::Tensor& flat, int64_t exchange, StageSeconds& seconds, Communicator& communicator) const;

 private:
  const bool hierarchical_;
  const bool pairs_;
};

}  // namespace bagua
