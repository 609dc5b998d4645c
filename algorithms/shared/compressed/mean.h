// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "algorithms/options.h"
#include "algorithms/shared/compressed/coding.h"
#include "algorithms/stage.h"
#include "backend/communicator.h"
#include "backend/topology/host_lanes.h"

namespace bagua::compressed {

struct MeanOptions {
  // Full precision inside a host, coded messages between hosts; false: coded messages between all ranks.
  bool hierarchical = true;
  // Mean over the ranks; false: their sum.
  bool average = true;
  // Each rank gets a part of the mean, which its owner does not code: see reduceToParts().
  bool isToParts = false;
};

// Replaces `flat`, on every rank by the same bits, by the mean over the ranks. Nothing is coded on a single rank, nor,
// with `hierarchical`, on a single host.
void reduceToMean(at::Tensor& flat, const MeanOptions& options, const Coding& coding, StageSeconds& seconds,
                  Communicator& communicator);

// The same in full precision.
void reduceExactly(at::Tensor& flat, const MeanOptions& options, StageSeconds& seconds, Communicator& communicator);
// And of a flat tensor that holds a part for each rank, in the order of the ranks: `own` becomes this rank's.
void reduceExactlyToParts(const at::Tensor& flat, at::Tensor& own, const MeanOptions& options, StageSeconds& seconds,
                          Communicator& communicator);

// The option "start_step" of algorithms that code gradients: in full precision before it. Throws ValueError below 0.
int64_t startStepOf(const Options& options);

// Whether messages are coded at all.
bool isCoded(const MeanOptions& options, const HostTopology& topology);
// Algorithm::whyUncoded() of those whose messages are coded where isCoded() says so.
std::string whyUncoded(const MeanOptions& options, const HostTopology& topology);

// A flat tensor of several that travel together, and how it is coded.
struct Sum {
  at::Tensor flat;
  Coding coding;
};

// As reduceToMean() of each in the same messages, where they are coded. Not all of them are empty. Whether all values
// are finite then, if the decoder has seen that: not where other ranks of the host have decoded some of them, nor on
// CUDA.
std::optional<bool> reduceToMeans(std::vector<Sum>& sums, const MeanOptions& options, StageSeconds& seconds,
                                  Communicator& communicator);

// For flat tensors that hold a part for each rank. Lanes cut such a tensor where its parts meet if hosts have equally
// many ranks and parts lie in partsInLanes(); where the hosts differ, all ranks code, in their own order.
MeanOptions optionsForParts(const MeanOptions& options, const Communicator& communicator);
// The ranks in the order in which lanes take their parts.
std::vector<int> partsInLanes(const MeanOptions& options, const Communicator& communicator);
// Each of `owns` becomes this rank's part of the mean of what the sum at its place holds, in the same messages. The
// sums hold anything then.
void reduceToParts(std::vector<Sum>& sums, std::vector<at::Tensor>& owns, const MeanOptions& options,
                   StageSeconds& seconds, Communicator& communicator);

// The lanes in which messages are coded. The topology has to outlive them.
struct CodedLanes {
  CodedLanes(const MeanOptions& options, int64_t length, const Communicator& communicator);

  const HostTopology topology;
  const HostLanes lanes;
};

}  // namespace bagua::compressed
