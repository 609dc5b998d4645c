// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "algorithms/shared/compressed/coding.h"
#include "algorithms/stage.h"
#include "backend/communicator.h"
#include "backend/topology/host_lanes.h"

// Collectives whose messages are coded, as steps of a program. All ranks of the communicator call, with the same lanes,
// sizes and coding (the residuals are each rank's own). `flat` is one-dimensional and contiguous, float32, float64,
// float16 or bfloat16.
//
// Who takes part is told by HostLanes: the owners of each lane, one per host, share that lane. Over
// HostTopology::oneRankPerHost() there is one lane and every rank takes part in it, in rank order.
//
// On the CPU pieces are coded and decoded while others travel; on CUDA chunks are coded whole, many at a time. The
// result is the same. With a single host nothing is coded.
namespace bagua::compressed {

// The elements of the flat tensor that `rank` owns, ascending: of each of its lanes the chunk of its host.
std::vector<Piece> ownPieces(const HostLanes& lanes, int rank);
// Elements in them.
int64_t ownLength(const HostLanes& lanes, int rank);

// `own`, flat and of the dtype of `flat`: the sum over the hosts, divided by `divisor`, of the elements this rank owns,
// as the decoded copies of all hosts give it. The copies are added in the order of the hosts.
void reduceScatter(const at::Tensor& flat, at::Tensor& own, const HostLanes& lanes, double divisor,
                   const Coding& coding, StageSeconds& seconds, Communicator& communicator);

// This rank's lanes in `flat` become what the owners of their chunks have in `own`, coded and decoded: the same bits on
// all hosts, the owner's own included. `coding.sender` is not used.
void allGather(at::Tensor& flat, const at::Tensor& own, const HostLanes& lanes, const Coding& coding,
               StageSeconds& seconds, Communicator& communicator);

// The one after the other, in place: this rank's lanes become the same bits on all hosts. An element is coded twice.
void allReduce(at::Tensor& flat, const HostLanes& lanes, double divisor, const Coding& coding, StageSeconds& seconds,
               Communicator& communicator);

// A flat tensor of several that travel together. Lanes and coding have to outlive the call.
struct FlatInLanes {
  at::Tensor flat;
  const HostLanes& lanes;
  const Coding& coding;
};

// As allReduce() of each, in the same messages: it takes as many one-way delays as one of them. Lanes are of the same
// topology, which has more than one host; tensors are on one device, and not all of them are empty. Whether all values
// of this rank's lanes are finite then; nothing on CUDA, where only the device knows.
std::optional<bool> allReduceTogether(const std::vector<FlatInLanes>& flats, double divisor, StageSeconds& seconds,
                                      Communicator& communicator);

}  // namespace bagua::compressed
