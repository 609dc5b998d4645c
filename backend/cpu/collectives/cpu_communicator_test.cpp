// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <set>
#include <thread>

#include "backend/operation/peer_errors.h"
#include "tests/support/contributions.h"
#include "tests/support/thread_ranks.h"

namespace bagua {
namespace {

using c10d::ReduceOp;
using testing::contribution;
using testing::sumOf;

// The host of every rank.
using Hosts = std::vector<std::string>;

class CpuCommunicatorOf : public ::testing::TestWithParam<Hosts> {
 protected:
  static int size() { return static_cast<int>(GetParam().size()); }
  static void runRanks(const std::function<void(Communicator&)>& body) { testing::runRanks(size(), body, GetParam()); }
  static void runOverSockets(const std::function<void(Communicator&)>& body) {
    testing::runRanksOverSockets(body, GetParam());
  }
};

// Below and above the size where the way of reducing changes, and sizes that no rank count divides.
const std::vector<int64_t> kSizes = {0, 1, 2, 1000, 5003, 100003};

TEST_P(CpuCommunicatorOf, AllReduceAddsOnEveryRank) {
  for (const int64_t numel : kSizes) {
    for (const auto dtype : {at::kFloat, at::kHalf, at::kLong}) {
      const at::Tensor expected = sumOf(size(), numel, dtype);
      runRanks([&](Communicator& communicator) {
        at::Tensor tensor = contribution(communicator.rank(), numel, dtype);
        communicator.allReduce(tensor, ReduceOp::SUM);
        EXPECT_TRUE(at::equal(tensor, expected)) << numel << " elements on rank " << communicator.rank();
      });
    }
  }
}

TEST_P(CpuCommunicatorOf, AllReduceGivesAllRanksTheSameBits) {
  std::vector<at::Tensor> results(size());
  runRanks([&](Communicator& communicator) {
    at::Tensor tensor = at::sin(at::arange(200003, at::kFloat) * (communicator.rank() + 1));
    communicator.allReduce(tensor, ReduceOp::SUM);
    results[communicator.rank()] = tensor;
  });
  for (const auto& result : results) EXPECT_TRUE(at::equal(result, results[0]));
}

TEST_P(CpuCommunicatorOf, MeansDivideByTheNumberOfAllRanks) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kInt}) {
    for (const int64_t numel : {int64_t{5}, int64_t{40001}}) {
      runRanks([&](Communicator& communicator) {
        at::Tensor tensor = at::full({numel}, 6 * (communicator.rank() + 1), dtype);
        communicator.allReduce(tensor, ReduceOp::AVG);
        EXPECT_TRUE(at::allclose(tensor.to(at::kDouble), at::full({numel}, 3.0 * (size() + 1), at::kDouble), 0.02));
      });
    }
  }
}

TEST_P(CpuCommunicatorOf, AMeanOfHalvesDoesNotOverflow) {
  runRanks([&](Communicator& communicator) {
    at::Tensor tensor = at::full({3000}, 40000.0, at::kHalf);
    communicator.allReduce(tensor, ReduceOp::AVG);
    EXPECT_TRUE(at::allclose(tensor.to(at::kDouble), at::full({3000}, 40000.0, at::kDouble), 0.01));
    communicator.reduceScatter(tensor, at::full({int64_t{size()} * 3000}, 40000.0, at::kHalf), ReduceOp::AVG);
    EXPECT_TRUE(at::allclose(tensor.to(at::kDouble), at::full({3000}, 40000.0, at::kDouble), 0.01));
  });
}

TEST_P(CpuCommunicatorOf, ReduceLeavesTheOtherRanksAlone) {
  for (int root = 0; root < size(); ++root) {
    runRanks([&](Communicator& communicator) {
      at::Tensor tensor = at::full({30001}, communicator.rank() + 1, at::kLong);
      communicator.reduce(tensor, root, ReduceOp::MAX);
      const int64_t expected = communicator.rank() == root ? communicator.size() : communicator.rank() + 1;
      EXPECT_TRUE(tensor.eq(expected).all().item<bool>());
    });
  }
}

TEST_P(CpuCommunicatorOf, BroadcastGivesAllWhatTheRootHas) {
  for (int root = 0; root < size(); ++root) {
    for (const int64_t numel : {int64_t{3}, int64_t{100001}}) {
      runRanks([&](Communicator& communicator) {
        at::Tensor tensor = contribution(communicator.rank(), numel, at::kDouble);
        communicator.broadcast(tensor, root);
        EXPECT_TRUE(at::equal(tensor, contribution(root, numel, at::kDouble)));
      });
    }
  }
}

TEST_P(CpuCommunicatorOf, AllGatherArrangesByRank) {
  for (const int64_t numel : {int64_t{1}, int64_t{70001}}) {
    runRanks([&](Communicator& communicator) {
      at::Tensor output = at::zeros({size() * numel});
      communicator.allGather(output, contribution(communicator.rank(), numel));
      for (int rank = 0; rank < size(); ++rank) {
        EXPECT_TRUE(at::equal(output.narrow(0, rank * numel, numel), contribution(rank, numel)));
      }
    });
  }
}

TEST_P(CpuCommunicatorOf, ReduceScatterGivesEachRankItsPart) {
  for (const int64_t numel : {int64_t{5}, int64_t{50021}}) {
    for (const auto& op : {ReduceOp(ReduceOp::SUM), ReduceOp(ReduceOp::AVG)}) {
      const at::Tensor total = sumOf(size(), size() * numel, at::kDouble);
      runRanks([&](Communicator& communicator) {
        at::Tensor output = at::empty({numel}, at::kDouble);
        communicator.reduceScatter(output, contribution(communicator.rank(), size() * numel, at::kDouble), op);
        const at::Tensor sum = total.narrow(0, communicator.rank() * numel, numel);
        EXPECT_TRUE(at::allclose(output, op == ReduceOp::AVG ? sum / size() : sum));
      });
    }
  }
}

TEST_P(CpuCommunicatorOf, UnevenAllToAllDeliversEveryPart) {
  for (const int64_t scale : {1, 9001}) {
    runRanks([&](Communicator& communicator) {
      const int rank = communicator.rank();
      // Rank i sends (i + j) times `scale` elements of value 10 i + j to rank j.
      std::vector<int64_t> splits;
      std::vector<at::Tensor> sent;
      std::vector<at::Tensor> expected;
      for (int peer = 0; peer < size(); ++peer) {
        splits.push_back((rank + peer) * scale);
        sent.push_back(at::full({splits.back()}, 10 * rank + peer, at::kDouble));
        expected.push_back(at::full({splits.back()}, 10 * peer + rank, at::kDouble));
      }
      at::Tensor output = at::zeros({at::cat(expected).numel()}, at::kDouble);
      communicator.allToAll(output, at::cat(sent), splits, splits);
      EXPECT_TRUE(at::equal(output, at::cat(expected)));
    });
  }
}

// As the executor of a user's all-to-all does.
void setUnevenProgram(Communicator& communicator, int root = -1) {
  Operation operation{.name = "uneven", .dtype = at::kInt, .peer = root};
  operation.commonNumel = Operation::kAnyNumel;
  communicator.setProgram(fingerprintOf(operation));
}

TEST_P(CpuCommunicatorOf, PartsThatDoNotFitAreRefusedBeforeTheyAreSent) {
  if (size() == 1) return;
  // The first rank sends the last one more than that expects.
  const int last = size() - 1;
  std::atomic<int> untouched{0};
  try {
    runOverSockets([&](Communicator& communicator) {
      const int rank = communicator.rank();
      setUnevenProgram(communicator);
      std::vector<int64_t> sent(size(), 2);
      const std::vector<int64_t> received(size(), 2);
      if (rank == 0) sent[last] = 5;
      const at::Tensor input = at::full({2 * size() + (rank == 0 ? 3 : 0)}, rank + 1, at::kInt);
      at::Tensor output = at::zeros({int64_t{2} * size()}, at::kInt);
      try {
        communicator.allToAll(output, input, received, sent);
      } catch (...) {
        // Nothing was exchanged between the two; parts of other ranks may have come.
        if (rank == last) untouched += output.narrow(0, 0, 2).eq(0).all().item<bool>() ? 1 : 0;
        throw;
      }
    });
    ADD_FAILURE() << "no error";
  } catch (const MismatchError& error) {
    EXPECT_NE(std::string(error.what_without_backtrace())
                  .find("rank 0 sends 5 elements to rank " + std::to_string(last) + ", which expects 2."),
              std::string::npos)
        << error.what_without_backtrace();
  }
  EXPECT_EQ(untouched, 1);
}

TEST_P(CpuCommunicatorOf, WhatGoesToOneRankOnlyIsComparedWithThatOne) {
  for (int root = 0; root < size(); ++root) {
    runOverSockets([&](Communicator& communicator) {
      const int rank = communicator.rank();
      setUnevenProgram(communicator, root);
      std::vector<int64_t> sent(size(), 0);
      std::vector<int64_t> received(size(), 0);
      sent[root] = rank + 1;
      int64_t total = 0;
      if (rank == root) {
        for (int peer = 0; peer < size(); ++peer) total += received[peer] = peer + 1;
      }
      at::Tensor output = at::zeros({total}, at::kLong);
      communicator.allToAll(output, at::full({rank + 1}, rank, at::kLong), received, sent);
      int64_t expected = 0;
      for (int peer = 0; peer < size(); ++peer) expected += int64_t{peer} * (peer + 1);
      EXPECT_EQ(output.sum().item<int64_t>(), rank == root ? expected : 0);
    });
  }
}

TEST_P(CpuCommunicatorOf, PiecesAreMadeBeforeTheyLeaveAndUsedAfterTheyArrive) {
  constexpr int64_t kBytes = 100'003;
  runRanks([&](Communicator& communicator) {
    at::Tensor sent = at::zeros({kBytes}, at::kByte);
    at::Tensor received = at::zeros({size() * kBytes}, at::kByte);
    const auto valueOf = [](int rank, int64_t begin) { return static_cast<int64_t>(rank + 1 + begin % 7); };
    int64_t made = 0;
    int64_t used = 0;
    const auto make = [&](int64_t begin, int64_t end) {
      EXPECT_EQ(begin, made);
      made = end;
      sent.narrow(0, begin, end - begin).fill_(valueOf(communicator.rank(), begin));
    };
    const auto use = [&](int64_t begin, int64_t end) {
      EXPECT_EQ(begin, used);
      used = end;
      for (int peer = 0; peer < size(); ++peer) {
        const at::Tensor piece = received.narrow(0, peer * kBytes + begin, end - begin);
        if (peer == communicator.rank()) continue;
        EXPECT_TRUE(piece.eq(valueOf(peer, begin)).all().item<bool>()) << "from rank " << peer << " at " << begin;
      }
    };
    communicator.allGatherInPieces(received, sent, {.beforeSending = make, .afterReceiving = use});
    EXPECT_EQ(made, kBytes);
    EXPECT_EQ(used, kBytes);
  });
}

// Who is not the one that speaks with the other hosts waits for these, too.
TEST_P(CpuCommunicatorOf, ABarrierEndsWhenTheLastHasCome) {
  std::atomic<bool> hasCome{false};
  runRanks([&](Communicator& communicator) {
    communicator.barrier();
    if (communicator.rank() == size() - 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      hasCome = true;
    }
    communicator.barrier();
    EXPECT_TRUE(hasCome) << "rank " << communicator.rank();
  });
}

TEST_P(CpuCommunicatorOf, EachByteCrossesTheNetworkOncePerHost) {
  const std::set<std::string> names(GetParam().begin(), GetParam().end());
  const auto hosts = static_cast<int64_t>(names.size());
  std::atomic<int64_t> allReduce{0};
  std::atomic<int64_t> allGather{0};
  std::atomic<int64_t> broadcast{0};
  const int64_t numel = int64_t{12} * 4096;
  runRanks([&](Communicator& communicator) {
    at::Tensor tensor = at::zeros({numel});
    communicator.allReduce(tensor, ReduceOp::SUM);
    const Traffic first = communicator.traffic();
    allReduce += first.betweenHostsBytes;
    at::Tensor output = at::zeros({size() * numel});
    communicator.allGather(output, tensor);
    const Traffic second = communicator.traffic();
    allGather += second.since(first).betweenHostsBytes;
    communicator.broadcast(tensor, 0);
    broadcast += communicator.traffic().since(second).betweenHostsBytes;
  });
  EXPECT_EQ(allReduce, 2 * (hosts - 1) * numel * 4);
  EXPECT_EQ(allGather, (hosts - 1) * size() * numel * 4);
  EXPECT_EQ(broadcast, (hosts - 1) * numel * 4);
}

INSTANTIATE_TEST_SUITE_P(Ranks, CpuCommunicatorOf,
                         ::testing::Values(Hosts{"a"}, Hosts{"a", "a"}, Hosts{"a", "a", "a"}, Hosts{"a", "a", "a", "a"},
                                           Hosts{"a", "b"}, Hosts{"a", "b", "c", "d"}, Hosts{"a", "a", "b", "b"},
                                           Hosts{"a", "b", "a", "b"}, Hosts{"a", "b", "a"},
                                           Hosts{"a", "a", "a", "b", "b", "c"}));

}  // namespace
}  // namespace bagua
