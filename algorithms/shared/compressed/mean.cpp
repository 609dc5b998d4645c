// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/compressed/mean.h"

#include <c10/util/StringUtil.h>

#include <memory>

#include "algorithms/shared/compressed/collectives.h"
#include "algorithms/shared/compressed/exchange.h"

namespace bagua::compressed {
namespace {

HostTopology topologyOf(const MeanOptions& options, const Communicator& communicator) {
  return options.hierarchical ? communicator.topology() : HostTopology::oneRankPerHost(communicator.size());
}

}  // namespace

CodedLanes::CodedLanes(const MeanOptions& options, int64_t length, const Communicator& communicator)
    : topology(topologyOf(options, communicator)), lanes(topology, communicator.rank(), length) {}

bool isCoded(const MeanOptions& options, const HostTopology& topology) {
  // Full precision inside a host, where there is only one.
  return topology.size() > 1 && (!options.hierarchical || topology.hostCount() > 1);
}

std::string whyUncoded(const MeanOptions& options, const HostTopology& topology) {
  if (isCoded(options, topology)) return {};
  if (topology.size() == 1) {
    return "The process group has one rank, which sends nothing. Start several, for instance with "
           "torchrun --nproc-per-node 2.";
  }
  return c10::str(
      "All ", topology.size(),
      " ranks run on one host, and hierarchical=True compresses between hosts only. Pass hierarchical=False "
      "to compress between the ranks of a host, too.");
}

void reduceToMean(at::Tensor& flat, const MeanOptions& options, const Coding& coding, StageSeconds& seconds,
                  Communicator& communicator) {
  if (flat.numel() == 0 || communicator.size() == 1) return;
  if (isCoded(options, communicator.topology())) {
    std::vector<Sum> sums = {{flat, coding}};
    static_cast<void>(reduceToMeans(sums, options, seconds, communicator));
    return;
  }
  reduceExactly(flat, options, seconds, communicator);
}

void reduceExactly(at::Tensor& flat, const MeanOptions& options, StageSeconds& seconds, Communicator& communicator) {
  const Stage stage(seconds, stages::kAllReduce);
  communicator.allReduce(flat, options.average ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM);
}

void reduceExactlyToParts(const at::Tensor& flat, at::Tensor& own, const MeanOptions& options, StageSeconds& seconds,
                          Communicator& communicator) {
  const Stage stage(seconds, stages::kReduceScatter);
  communicator.reduceScatter(own, flat, options.average ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM);
}

int64_t startStepOf(const Options& options) {
  const auto startStep = options.get<int64_t>("start_step");
  TORCH_CHECK_VALUE(startStep >= 0, "bagua: start_step must be at least 0, got ", startStep);
  return startStep;
}

std::optional<bool> reduceToMeans(std::vector<Sum>& sums, const MeanOptions& options, StageSeconds& seconds,
                                  Communicator& communicator) {
  std::vector<std::unique_ptr<CodedLanes>> lanes;
  std::vector<FlatInLanes> flats;
  for (const auto& sum : sums) {
    lanes.push_back(std::make_unique<CodedLanes>(options, sum.flat.numel(), communicator));
    flats.push_back({sum.flat, lanes.back()->lanes, sum.coding});
  }
  const int divisor = options.average ? communicator.size() : 1;
  if (flats.front().lanes.count() == 1) return allReduceTogether(flats, divisor, seconds, communicator);
  {
    const Stage stage(seconds, stages::kReduceInHost);
    for (auto& one : flats) communicator.reduceScatterInHost(one.flat, one.lanes.partsInHost(), divisor);
  }
  // Already divided above, where a sum of 16-bit floats could overflow.
  static_cast<void>(allReduceTogether(flats, 1, seconds, communicator));
  const Stage stage(seconds, stages::kGatherInHost);
  for (auto& one : flats) communicator.allGatherInHost(one.flat, one.lanes.partsInHost());
  return std::nullopt;
}

MeanOptions optionsForParts(const MeanOptions& options, const Communicator& communicator) {
  MeanOptions forParts = options;
  forParts.isToParts = true;
  forParts.hierarchical = options.hierarchical && CodedLanes(options, communicator.size(), communicator).lanes.isEven();
  return forParts;
}

std::vector<int> partsInLanes(const MeanOptions& options, const Communicator& communicator) {
  const CodedLanes coded(options, communicator.size(), communicator);
  std::vector<int> ranks;
  for (int lane = 0; lane < coded.lanes.count(); ++lane) {
    for (const int owner : coded.lanes.owners(lane)) ranks.push_back(owner);
  }
  return ranks;
}

void reduceToParts(std::vector<Sum>& sums, std::vector<at::Tensor>& owns, const MeanOptions& options,
                   StageSeconds& seconds, Communicator& communicator) {
  std::vector<std::unique_ptr<CodedLanes>> lanes;
  std::vector<Section> sections;
  for (size_t i = 0; i < sums.size(); ++i) {
    lanes.push_back(std::make_unique<CodedLanes>(options, sums[i].flat.numel(), communicator));
    sections.push_back({sums[i].flat, owns[i], lanes.back()->lanes, sums[i].coding});
  }
  double divisor = options.average ? communicator.size() : 1;
  if (lanes.front()->lanes.count() > 1) {
    const Stage stage(seconds, stages::kReduceInHost);
    for (auto& section : sections) {
      communicator.reduceScatterInHost(section.flat, section.lanes.partsInHost(), static_cast<int64_t>(divisor));
    }
    divisor = 1;
  }
  Exchange(sections, false, seconds, communicator).reduce(divisor);
}

}  // namespace bagua::compressed
