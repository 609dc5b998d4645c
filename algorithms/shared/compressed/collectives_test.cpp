// SPDX-License-Identifier: Apache-2.0
// Every registered codec, on threads as ranks, against what the codec makes of whole chunks on one thread.
#include "algorithms/shared/compressed/collectives.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <mutex>

#include "tests/support/thread_ranks.h"

namespace bagua::compressed {
namespace {

using Hosts = std::vector<std::string>;

struct Case {
  std::string codec;
  Hosts hosts;
  // Whether the ranks of a host share lanes, or every rank takes part by itself.
  bool byLanes = false;
};

std::string nameOf(const Case& it) {
  std::string name = it.codec + (it.byLanes ? "_by_lanes" : "_in_rank_order");
  for (const auto& host : it.hosts) name += "_" + host;
  std::replace_if(
      name.begin(), name.end(), [](char c) { return std::isalnum(c) == 0; }, '_');
  return name;
}

// GoogleTest looks for this name.
// NOLINTNEXTLINE(readability-identifier-naming)
void PrintTo(const Case& it, std::ostream* stream) { *stream << nameOf(it); }

std::vector<Case> casesOf(const std::vector<std::string>& codecs) {
  std::vector<Case> cases;
  for (const auto& codec : codecs) {
    for (const Hosts& hosts : {Hosts{"a", "b"}, Hosts{"a", "b", "c"}, Hosts{"a", "a", "a"}}) {
      cases.push_back({codec, hosts});
    }
    // Even, in another order on each host, uneven.
    for (const Hosts& hosts : {Hosts{"a", "a", "b", "b"}, Hosts{"a", "b", "b", "a"}, Hosts{"a", "b", "b"},
                               Hosts{"a", "b", "b", "c", "c", "c"}}) {
      cases.push_back({codec, hosts, true});
    }
  }
  return cases;
}

Hosts manyHosts() {
  Hosts hosts;
  for (char host = 'a'; host < 'x'; ++host) hosts.emplace_back(1, host);
  return hosts;
}

class Collectives : public ::testing::TestWithParam<Case> {
 protected:
  [[nodiscard]] int size() const { return static_cast<int>(GetParam().hosts.size()); }
  [[nodiscard]] HostTopology topology() const {
    return GetParam().byLanes ? HostTopology(GetParam().hosts) : HostTopology::oneRankPerHost(size());
  }
  [[nodiscard]] Coding coding() const { return {.codec = CodecRegistry::find(GetParam().codec).codec}; }

  [[nodiscard]] std::vector<at::Tensor> valuesOfRanks(int64_t numel, at::ScalarType dtype) const {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(11);
    std::vector<at::Tensor> values;
    for (int rank = 0; rank < size(); ++rank) values.push_back(at::randn({numel}, generator).add(0.2 * rank).to(dtype));
    return values;
  }

  // body(lanes, seconds, communicator)
  template <typename Body>
  void onAllRanks(int64_t numel, Body body) const {
    const HostTopology participants = topology();
    testing::runRanks(
        size(),
        [&](Communicator& communicator) {
          const HostLanes lanes(participants, communicator.rank(), numel);
          StageSeconds seconds;
          body(lanes, seconds, communicator);
        },
        GetParam().hosts);
  }

  // The values of a chunk as they are after a coding; `encoding` has the key of the chunk's place.
  [[nodiscard]] at::Tensor coded(const at::Tensor& chunk, const Encoding& encoding) const {
    at::Tensor packed = packedOf(chunk, encoding);
    at::Tensor decoded = at::empty_like(chunk);
    coding().codec->decode(packed, {0, chunk.numel()}, decoded);
    return decoded;
  }
  [[nodiscard]] at::Tensor packedOf(const at::Tensor& chunk, const Encoding& encoding) const {
    const auto& codec = *coding().codec;
    at::Tensor packed = at::empty({codec.layout().packedBytes(chunk.numel())}, at::kByte);
    codec.start(chunk, encoding, packed);
    codec.encode(chunk, {0, chunk.numel()}, encoding, packed);
    return packed;
  }
  [[nodiscard]] at::Tensor meanOf(const std::vector<at::Tensor>& chunks, double divisor,
                                  const Encoding& encoding) const {
    std::vector<at::Tensor> rows;
    for (const auto& chunk : chunks) rows.push_back(packedOf(chunk, encoding));
    at::Tensor mean = at::empty_like(chunks[0]);
    at::Tensor packed = at::empty_like(rows[0]);
    coding().codec->decodeMean(at::stack(rows), {0, mean.numel()}, divisor, {}, mean, packed);
    return mean;
  }

  // What an owner of a chunk makes of the copies.
  struct Mean {
    int64_t begin = 0;
    at::Tensor values;
    Encoding encoding;
  };
  // By (lane, host).
  [[nodiscard]] std::vector<Mean> meansOf(const std::vector<at::Tensor>& values, double divisor) const {
    std::vector<Mean> means;
    const HostTopology participants = topology();
    for (int rank = 0; rank < size(); ++rank) {
      const HostLanes lanes(participants, rank, values[0].numel());
      for (int lane = lanes.firstLane(rank); lane < lanes.endLane(rank); ++lane) {
        const int64_t length = (lanes.length(0) + lanes.hostCount() - 1) / lanes.hostCount();
        const int64_t begin = lanes.begin(lane) + std::min(lanes.ownHost() * length, lanes.length(lane));
        const int64_t end = lanes.begin(lane) + std::min((lanes.ownHost() + 1) * length, lanes.length(lane));
        std::vector<at::Tensor> copies;
        for (const int owner : lanes.owners(lane)) copies.push_back(values[owner].narrow(0, begin, end - begin));
        const Encoding encoding =
            Encoding{}.narrow(lanes.begin(lane), lanes.length(lane)).narrow(begin - lanes.begin(lane), end - begin);
        if (begin < end) means.push_back({begin, meanOf(copies, divisor, encoding), encoding});
      }
    }
    return means;
  }
};

// Fewer elements than ranks; multiples of nothing; several pieces on the way.
const std::vector<int64_t> kLengths = {1, 37, 1001, 150'001};

TEST_P(Collectives, AllReduceIsWhatTheCodecMakesOfChunks) {
  for (const auto dtype : {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble}) {
    for (const int64_t numel : kLengths) {
      const auto values = valuesOfRanks(numel, dtype);
      at::Tensor expected = at::zeros_like(values[0]);
      for (const auto& [begin, mean, encoding] : meansOf(values, size())) {
        expected.narrow(0, begin, mean.numel()).copy_(coded(mean, encoding));
      }
      onAllRanks(numel, [&](const HostLanes& lanes, StageSeconds& seconds, Communicator& communicator) {
        const int rank = communicator.rank();
        at::Tensor flat = values[rank].clone();
        allReduce(flat, lanes, size(), coding(), seconds, communicator);
        const int64_t begin = lanes.begin(lanes.firstLane(rank));
        const auto own = [&](const at::Tensor& tensor) { return tensor.narrow(0, begin, lanes.ownLength(rank)); };
        EXPECT_TRUE(at::equal(own(flat), own(expected))) << numel << " of " << dtype << " on rank " << rank;
        if (numel > lanes.count()) {
          StageSeconds all;
          all.take(seconds);
          EXPECT_TRUE(all.totals().contains("compress") && all.totals().contains("decompress"));
        }
      });
    }
  }
}

TEST_P(Collectives, ReduceScatterGivesTheOwnersWhatAllGatherSpreads) {
  for (const int64_t numel : kLengths) {
    const auto values = valuesOfRanks(numel, at::kFloat);
    at::Tensor means = at::zeros_like(values[0]);
    at::Tensor expected = at::zeros_like(values[0]);
    for (const auto& [begin, mean, encoding] : meansOf(values, 1)) {
      means.narrow(0, begin, mean.numel()).copy_(mean);
      expected.narrow(0, begin, mean.numel()).copy_(coded(mean, encoding));
    }
    onAllRanks(numel, [&](const HostLanes& lanes, StageSeconds& seconds, Communicator& communicator) {
      const int rank = communicator.rank();
      at::Tensor own = at::empty({ownLength(lanes, rank)}, at::kFloat);
      reduceScatter(values[rank], own, lanes, 1, coding(), seconds, communicator);
      int64_t done = 0;
      for (const auto& piece : ownPieces(lanes, rank)) {
        const int64_t length = piece.end - piece.begin;
        EXPECT_TRUE(at::equal(own.narrow(0, done, length), means.narrow(0, piece.begin, length))) << numel;
        done += length;
      }
      EXPECT_EQ(done, own.numel());
      at::Tensor flat = at::full({numel}, 7.0F);
      allGather(flat, own, lanes, coding(), seconds, communicator);
      const int64_t begin = lanes.begin(lanes.firstLane(rank));
      EXPECT_TRUE(
          at::equal(flat.narrow(0, begin, lanes.ownLength(rank)), expected.narrow(0, begin, lanes.ownLength(rank))))
          << numel << " on rank " << rank;
    });
  }
}

// Of the test's own codec, which needs no tolerance.
class CollectivesWithFeedback : public Collectives {};

TEST_P(CollectivesWithFeedback, WhatRoundingLosesIsInTheResidualsOfSendersAndOwners) {
  constexpr int64_t kNumel = 30'011;
  constexpr int kSteps = 5;
  at::Tensor given = at::zeros({kNumel}, at::kDouble);
  at::Tensor kept = at::zeros_like(given);
  at::Tensor seen = at::zeros_like(given);
  std::mutex mutex;
  onAllRanks(kNumel, [&](const HostLanes& lanes, StageSeconds& seconds, Communicator& communicator) {
    const int rank = communicator.rank();
    Coding feedback = coding();
    feedback.sender.residual = feedback.sender.nextResidual = at::zeros({kNumel});
    feedback.owner.residual = feedback.owner.nextResidual = at::zeros({ownLength(lanes, rank)});
    const int64_t begin = lanes.begin(lanes.firstLane(rank));
    const auto own = [&](const at::Tensor& tensor) { return tensor.narrow(0, begin, lanes.ownLength(rank)); };
    const at::Tensor values = valuesOfRanks(kNumel, at::kFloat)[rank];
    for (int step = 0; step < kSteps; ++step) {
      at::Tensor flat = values * (step + 1);
      {
        const std::lock_guard<std::mutex> lock(mutex);
        own(given).add_(own(flat));
      }
      allReduce(flat, lanes, 1, feedback, seconds, communicator);
      const std::lock_guard<std::mutex> lock(mutex);
      // All hosts see the same.
      if (lanes.ownHost() == 0) own(seen).add_(own(flat));
    }
    const std::lock_guard<std::mutex> lock(mutex);
    own(kept).add_(own(feedback.sender.residual));
    int64_t done = 0;
    for (const auto& piece : ownPieces(lanes, rank)) {
      const int64_t length = piece.end - piece.begin;
      kept.narrow(0, piece.begin, length).add_(feedback.owner.residual.narrow(0, done, length));
      done += length;
    }
  });
  EXPECT_GT(kept.abs().max().item<double>(), 1e-4);
  // In each of 5 steps at most 10 roundings to float32, of sums of 3 hosts' numbers below 30.
  EXPECT_LT((given - seen - kept).abs().max().item<double>(), 50 * 90 * 6e-8);
  EXPECT_GT((given - seen).abs().max().item<double>(), 1e-3);
}

INSTANTIATE_TEST_SUITE_P(Every, Collectives, ::testing::ValuesIn(casesOf(CodecRegistry::names())),
                         [](const auto& instance) { return nameOf(instance.param); });

// Small parts go through a grid, and the results of owners in rounds; large ones go straight.
INSTANTIATE_TEST_SUITE_P(ManyHosts, Collectives, ::testing::Values(Case{"minmax_uint8", manyHosts()}),
                         [](const auto& instance) { return nameOf(instance.param); });

INSTANTIATE_TEST_SUITE_P(Halves, CollectivesWithFeedback, ::testing::ValuesIn(casesOf({"halves"})),
                         [](const auto& instance) { return nameOf(instance.param); });

TEST(CollectivesOfOneRank, CodeNothing) {
  testing::runRanks(1, [](Communicator& communicator) {
    const HostLanes lanes(communicator.topology(), 0, 5);
    const at::Tensor given = at::randn({5});
    at::Tensor flat = given.clone();
    StageSeconds seconds;
    allReduce(flat, lanes, 2, {}, seconds, communicator);
    EXPECT_TRUE(at::equal(flat, given / 2));
    at::Tensor own = at::zeros({5});
    reduceScatter(given, own, lanes, 1, {}, seconds, communicator);
    EXPECT_TRUE(at::equal(own, given));
    allGather(flat, own, lanes, {}, seconds, communicator);
    EXPECT_TRUE(at::equal(flat, given));
  });
}

}  // namespace
}  // namespace bagua::compressed
