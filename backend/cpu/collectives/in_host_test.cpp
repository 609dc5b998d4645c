// SPDX-License-Identifier: Apache-2.0
// The steps of a hierarchical reduction inside a host: through shared memory, and as a transport without them has them.
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "backend/topology/host_lanes.h"
#include "tests/support/thread_ranks.h"

namespace bagua {
namespace {

using Hosts = std::vector<std::string>;
constexpr at::ScalarType kTypes[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16};

at::Tensor valuesOf(int rank, int64_t numel, at::ScalarType dtype) {
  return at::sin(at::arange(numel, at::kDouble) * (rank + 1)).mul_(100).to(dtype);
}

class InHost : public ::testing::TestWithParam<Hosts> {
 protected:
  using Step = void (*)(Communicator&, at::Tensor&, const Communicator::Splits&, int64_t divisor);

  // What every rank has after `step`, by rank.
  static std::vector<at::Tensor> after(Step step, int64_t numel, at::ScalarType dtype, int64_t divisor) {
    std::vector<at::Tensor> results(GetParam().size());
    testing::runRanks(
        static_cast<int>(GetParam().size()),
        [&](Communicator& communicator) {
          const HostLanes lanes(communicator.topology(), communicator.rank(), numel);
          at::Tensor flat = valuesOf(communicator.rank(), numel, dtype);
          step(communicator, flat, lanes.partsInHost(), divisor);
          results[communicator.rank()] = flat;
        },
        GetParam());
    return results;
  }

  static void reduce(Communicator& communicator, at::Tensor& flat, const Communicator::Splits& parts, int64_t divisor) {
    communicator.reduceScatterInHost(flat, parts, divisor);
  }
  static void reduceByDefault(Communicator& communicator, at::Tensor& flat, const Communicator::Splits& parts,
                              int64_t divisor) {
    communicator.Communicator::reduceScatterInHost(flat, parts, divisor);
  }
  static void gather(Communicator& communicator, at::Tensor& flat, const Communicator::Splits& parts,
                     int64_t /*divisor*/) {
    communicator.allGatherInHost(flat, parts);
  }
  static void gatherByDefault(Communicator& communicator, at::Tensor& flat, const Communicator::Splits& parts,
                              int64_t /*divisor*/) {
    communicator.Communicator::allGatherInHost(flat, parts);
  }
};

// What a rank is to have: its own values, but in its part the sum in rank order, made in float32 at least and rounded
// once.
at::Tensor reduced(const HostTopology& topology, int rank, int64_t numel, at::ScalarType dtype, int64_t divisor) {
  at::Tensor sum = at::zeros({numel}, dtype == at::kDouble ? at::kDouble : at::kFloat);
  for (const int peer : topology.ranksOf(topology.hostOf(rank))) sum += valuesOf(peer, numel, dtype);
  const HostLanes lanes(topology, rank, numel);
  const int64_t begin = lanes.begin(lanes.firstLane(rank));
  const at::Tensor all = valuesOf(rank, numel, dtype);
  all.narrow(0, begin, lanes.ownLength(rank)).copy_(sum.div_(divisor).narrow(0, begin, lanes.ownLength(rank)));
  return all;
}

TEST_P(InHost, EachRankGetsTheSumOverItsHostOfItsPartAndKeepsTheOthers) {
  const HostTopology topology(GetParam());
  for (const auto dtype : kTypes) {
    for (const auto& [numel, divisor] : {std::pair<int64_t, int64_t>{1, 6}, {1001, 1}, {20'003, 6}}) {
      const auto results = after(reduce, numel, dtype, divisor);
      // Whose order of additions is ATen's.
      const auto byDefault = after(reduceByDefault, numel, dtype, divisor);
      const double tolerance = dtype == at::kDouble ? 1e-12 : dtype == at::kFloat ? 1e-5 : 0.01;
      for (int rank = 0; rank < topology.size(); ++rank) {
        const at::Tensor expected = reduced(topology, rank, numel, dtype, divisor);
        EXPECT_TRUE(at::equal(results[rank], expected)) << numel << " of " << dtype << " on rank " << rank;
        EXPECT_TRUE(at::allclose(byDefault[rank], expected, tolerance, 10 * tolerance))
            << numel << " of " << dtype << " on rank " << rank;
      }
    }
  }
}

TEST_P(InHost, EachRankGetsThePartsOfTheOthers) {
  const HostTopology topology(GetParam());
  for (const Step step : {gather, gatherByDefault}) {
    for (const auto dtype : {at::kDouble, at::kBFloat16}) {
      for (const int64_t numel : {int64_t{1}, int64_t{1001}, int64_t{50'003}}) {
        const auto results = after(step, numel, dtype, 1);
        for (int rank = 0; rank < topology.size(); ++rank) {
          std::vector<at::Tensor> parts;
          for (const int peer : topology.ranksOf(topology.hostOf(rank))) {
            const HostLanes lanes(topology, peer, numel);
            const int64_t begin = lanes.begin(lanes.firstLane(peer));
            parts.push_back(valuesOf(peer, numel, dtype).narrow(0, begin, lanes.ownLength(peer)));
          }
          EXPECT_TRUE(at::equal(results[rank], at::cat(parts))) << numel << " of " << dtype << " on rank " << rank;
        }
      }
    }
  }
}

TEST_P(InHost, AMeanOfHalvesDoesNotOverflow) {
  const auto size = static_cast<int>(GetParam().size());
  testing::runRanks(
      size,
      [&](Communicator& communicator) {
        const auto peers = static_cast<int64_t>(
            communicator.topology().ranksOf(communicator.topology().hostOf(communicator.rank())).size());
        const HostLanes lanes(communicator.topology(), communicator.rank(), 3000);
        at::Tensor flat = at::full({3000}, 40'000, at::kHalf);
        communicator.reduceScatterInHost(flat, lanes.partsInHost(), peers);
        EXPECT_TRUE(at::equal(flat, at::full({3000}, 40'000, at::kHalf)));
      },
      GetParam());
}

INSTANTIATE_TEST_SUITE_P(Layouts, InHost,
                         ::testing::Values(Hosts{"a", "b"}, Hosts{"a", "a", "b", "b"}, Hosts{"a", "a", "a", "b"},
                                           Hosts{"a", "b", "b", "a"}, Hosts{"a", "b", "b", "c", "c", "c", "c", "c"}));

}  // namespace
}  // namespace bagua
