// SPDX-License-Identifier: Apache-2.0
// The ways that hosts choose by their lines, and that all of them give the same bits.
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <thread>

#include "backend/cpu/collectives/reduction.h"
#include "backend/operation/tensor_bytes.h"
#include "tests/support/contributions.h"
#include "tests/support/thread_ranks.h"

namespace bagua {
namespace {

using c10d::ReduceOp;
using testing::contribution;
using testing::sumOf;

// The bytes that rank 0 sends for each of some allreduces of 120,000 bytes between four hosts.
std::vector<int64_t> bytesOfAllReduces(const std::function<Wire::Line(int rank, int peer)>& lines) {
  constexpr int64_t kNumel = 30'000;
  std::vector<int64_t> sent;
  const auto body = [&](Communicator& communicator) {
    for (int call = 0; call < 4; ++call) {
      const Traffic before = communicator.traffic();
      at::Tensor tensor = contribution(communicator.rank(), kNumel);
      communicator.allReduce(tensor, ReduceOp::SUM);
      EXPECT_TRUE(at::equal(tensor, sumOf(4, kNumel)));
      if (communicator.rank() == 0) sent.push_back(communicator.traffic().since(before).betweenHostsBytes);
    }
  };
  testing::runRanks(4, body, {"a", "b", "c", "d"}, lines);
  return sent;
}

constexpr int64_t kInParts = 2 * 3 * 120'000 / 4;
constexpr int64_t kWhole = int64_t{3} * 120'000;
// What each tells each other one in the second call.
constexpr int64_t kProposals = 3 * 16;

TEST(OneExchange, IsTakenUpToTheSizeThatSparesTime) {
  // 9 MB are under way to the three peers together.
  const auto far = [](int, int) { return Wire::Line{std::chrono::milliseconds(30), 100'000'000}; };
  EXPECT_EQ(bytesOfAllReduces(far), (std::vector<int64_t>{kInParts, kInParts + kProposals, kWhole, kWhole}));
  const auto near = [](int, int) { return Wire::Line{std::chrono::microseconds(50), 300'000'000}; };
  EXPECT_EQ(bytesOfAllReduces(near), (std::vector<int64_t>{kInParts, kInParts + kProposals, kInParts, kInParts}));
}

TEST(OneExchange, IsNotTakenWhereOneRankHasASlowLine) {
  const auto uneven = [](int rank, int) {
    return Wire::Line{std::chrono::milliseconds(30), rank == 2 ? 1'000'000 : 100'000'000};
  };
  EXPECT_EQ(bytesOfAllReduces(uneven), (std::vector<int64_t>{kInParts, kInParts + kProposals, kInParts, kInParts}));
}

std::vector<std::string> hostsOfOneRank(int count) {
  std::vector<std::string> hosts;
  for (int host = 0; host < count; ++host) hosts.push_back("host " + std::to_string(host));
  return hosts;
}

// Lines over which the ranks choose as many rounds as there are halvings, as few as there may be, and parts, in rounds
// or at once.
const std::vector<Wire::Line> kLines = {{std::chrono::microseconds(1), 100'000'000'000},
                                        {std::chrono::milliseconds(500), 1'000'000'000},
                                        {std::chrono::microseconds(1), 1'000'000},
                                        {std::chrono::microseconds(1), 1000}};

// Has the ranks take `line` for what is between them, of which they agree in their second call.
void agreeOnLines(Communicator& communicator) {
  for (int call = 0; call < 2; ++call) {
    at::Tensor tensor = at::zeros({1000});
    communicator.allReduce(tensor, ReduceOp::SUM);
  }
}

// The bytes that each rank sends in an allreduce.
std::vector<int64_t> bytesOfAllReduce(int count, const Wire::Line& line, int64_t numel) {
  std::vector<int64_t> bytes(count);
  const auto body = [&](Communicator& communicator) {
    agreeOnLines(communicator);
    const Traffic before = communicator.traffic();
    at::Tensor tensor = contribution(communicator.rank(), numel);
    communicator.allReduce(tensor, ReduceOp::SUM);
    EXPECT_TRUE(at::equal(tensor, sumOf(count, numel)));
    bytes[communicator.rank()] = communicator.traffic().since(before).betweenHostsBytes;
  };
  testing::runRanks(count, body, hostsOfOneRank(count), [&](int, int) { return line; });
  return bytes;
}

TEST(ManyHosts, ReduceWithMessagesThatGrowWithTheLogarithm) {
  EXPECT_EQ(bytesOfAllReduce(8, kLines[0], 1000), std::vector<int64_t>(8, int64_t{7} * 4000));
  EXPECT_EQ(bytesOfAllReduce(16, kLines[0], 1000), std::vector<int64_t>(16, int64_t{4} * 4000));
  EXPECT_EQ(bytesOfAllReduce(16, kLines[1], 1000), std::vector<int64_t>(16, int64_t{15} * 4000));
  EXPECT_EQ(bytesOfAllReduce(64, kLines[0], 1000), std::vector<int64_t>(64, int64_t{6} * 4000));
  // No more than 31 in a round, however long that takes.
  EXPECT_EQ(bytesOfAllReduce(64, kLines[1], 1000), std::vector<int64_t>(64, int64_t{7 + 7} * 4000));
}

const std::vector<at::ScalarType> kReducible = {
    at::kByte, at::kChar, at::kShort,    at::kInt,   at::kLong,   at::kUInt16,       at::kUInt32,       at::kUInt64,
    at::kBool, at::kHalf, at::kBFloat16, at::kFloat, at::kDouble, at::kComplexFloat, at::kComplexDouble};
const std::vector<ReduceOp::RedOpType> kOps = {ReduceOp::SUM, ReduceOp::AVG,  ReduceOp::PRODUCT, ReduceOp::MIN,
                                               ReduceOp::MAX, ReduceOp::BAND, ReduceOp::BOR,     ReduceOp::BXOR};

// What does not add up to the same in another order.
at::Tensor fractions(int rank, int64_t numel, at::ScalarType dtype) {
  const at::Tensor values = at::sin(at::arange(numel, at::kDouble) * (rank + 1)) * 100;
  return at::isFloatingType(dtype) || at::isComplexType(dtype) ? values.to(dtype) : values.abs().to(dtype);
}

// Of every dtype and operation: what each rank has, and what they should all get.
struct ReductionCase {
  ReduceOp::RedOpType op;
  std::vector<at::Tensor> given;
  at::Tensor expected;
};

std::vector<ReductionCase> everyReduction(int count, int64_t numel) {
  const GroupIdentity group;
  const ArgumentChecks checks("op", group);
  std::vector<ReductionCase> cases;
  for (const auto dtype : kReducible) {
    std::vector<at::Tensor> given;
    std::vector<const void*> parts;
    for (int rank = 0; rank < count; ++rank) {
      given.push_back(fractions(rank, numel, dtype));
      parts.push_back(given.back().const_data_ptr());
    }
    for (const auto op : kOps) {
      try {
        reduction::checkSupported(checks, op, dtype);
      } catch (const c10::Error&) {
        continue;
      }
      cases.push_back({op, given, at::empty({numel}, dtype)});
      reduction::reduceHosts(parts, op, count, cases.back().expected);
    }
  }
  return cases;
}

void expectTheSameBits(int count, int64_t numel, const Wire::Line& line) {
  auto cases = everyReduction(count, numel);
  EXPECT_GT(cases.size(), 70U);
  // Of the other numbers one dtype that is rounded between rounds, and one that is not.
  constexpr std::array kWithEveryDtype{2, 9, 16, 37};
  if (std::find(kWithEveryDtype.begin(), kWithEveryDtype.end(), count) == kWithEveryDtype.end()) {
    std::erase_if(cases, [](const ReductionCase& reduction) {
      const auto dtype = reduction.expected.scalar_type();
      return dtype != at::kFloat && dtype != at::kBFloat16;
    });
  }
  const auto body = [&](Communicator& communicator) {
    agreeOnLines(communicator);
    for (const auto& reduction : cases) {
      at::Tensor tensor = reduction.given[communicator.rank()].clone();
      communicator.allReduce(tensor, reduction.op);
      const bool isSame =
          std::memcmp(tensor.const_data_ptr(), reduction.expected.const_data_ptr(), tensor.nbytes()) == 0;
      EXPECT_TRUE(isSame) << tensor.dtype() << ", operation " << static_cast<int>(reduction.op) << ", rank "
                          << communicator.rank() << " of " << count;
    }
  };
  testing::runRanks(count, body, hostsOfOneRank(count), [&](int, int) { return line; });
}

TEST(ManyHosts, GetTheSameBitsInHoweverManyRounds) {
  for (int count = 2; count <= 17; ++count) {
    for (const auto& line : kLines) {
      // Up to eight have one way, but for the parts.
      if (count > reduction::kMostInOrder || &line == &kLines.front() || &line == &kLines.back()) {
        expectTheSameBits(count, 101, line);
      }
    }
  }
  // No longer all at once.
  for (const auto& line : {kLines[1], kLines[2]}) expectTheSameBits(37, 101, line);
}

TEST(ManyHosts, GetTheSameBitsWhereSomeHaveAnEmptyPart) {
  for (const int64_t numel : {1, 9, 13, 17, 40}) {
    for (const int count : {9, 16, 33}) expectTheSameBits(count, numel, kLines[2]);
  }
}

TEST(ManyHosts, ReduceInPartsWithMessagesThatGrowWithTheLogarithm) {
  // Both ways, all but its own part: 2 (n - 1) / n of the tensor.
  const int64_t numel = 64 * 1000;
  EXPECT_EQ(bytesOfAllReduce(64, {std::chrono::microseconds(1), 100'000'000}, numel),
            std::vector<int64_t>(64, int64_t{2} * 63 * 4000));
}

// As numbers of ranks and hosts have it.
TEST(ManyHosts, GatherAndBroadcastInRounds) {
  for (int count = 2; count <= 40; count += count < 17 ? 1 : 5) {
    for (const auto& line : {kLines[0], kLines[1]}) {
      std::atomic<int64_t> sent{0};
      const auto body = [&](Communicator& communicator) {
        agreeOnLines(communicator);
        at::Tensor output = at::zeros({int64_t{3} * count}, at::kInt);
        communicator.allGather(output, contribution(communicator.rank(), 3, at::kInt));
        for (int rank = 0; rank < count; ++rank) {
          EXPECT_TRUE(at::equal(output.narrow(0, int64_t{3} * rank, 3), contribution(rank, 3, at::kInt)))
              << "part " << rank << " on rank " << communicator.rank() << " of " << count;
        }
        const Traffic before = communicator.traffic();
        for (int root = 0; root < count; ++root) {
          at::Tensor tensor = contribution(communicator.rank(), 5, at::kInt);
          communicator.broadcast(tensor, root);
          EXPECT_TRUE(at::equal(tensor, contribution(root, 5, at::kInt)))
              << "root " << root << ", rank " << communicator.rank() << " of " << count;
        }
        sent += communicator.traffic().since(before).betweenHostsBytes;
      };
      testing::runRanks(count, body, hostsOfOneRank(count), [&](int, int) { return line; });
      // Each hears it once.
      EXPECT_EQ(sent, int64_t{count} * (count - 1) * 20);
    }
  }
}

// Sums of all but the root are handed on once, whoever hands them on.
TEST(ManyHosts, ReduceInRoundsToTheSameBitsAsAnAllReduce) {
  for (const int count : {9, 13, 16, 37}) {
    for (const auto& line : {kLines[0], kLines[1]}) {
      const auto cases = everyReduction(count, 7);
      std::atomic<int64_t> sent{0};
      const auto body = [&](Communicator& communicator) {
        agreeOnLines(communicator);
        int root = 0;
        for (const auto& reduction : cases) {
          root = (root + 5) % count;
          const at::Tensor& given = reduction.given[communicator.rank()];
          at::Tensor tensor = given.clone();
          communicator.reduce(tensor, root, reduction.op);
          const at::Tensor& expected = communicator.rank() == root ? reduction.expected : given;
          const bool isSame = std::memcmp(tensor.const_data_ptr(), expected.const_data_ptr(), tensor.nbytes()) == 0;
          EXPECT_TRUE(isSame) << tensor.dtype() << ", operation " << static_cast<int>(reduction.op) << ", root " << root
                              << ", rank " << communicator.rank() << " of " << count;
        }
        const Traffic before = communicator.traffic();
        at::Tensor tensor = at::zeros({10});
        communicator.reduce(tensor, root, ReduceOp::SUM);
        sent += communicator.traffic().since(before).betweenHostsBytes;
      };
      testing::runRanks(count, body, hostsOfOneRank(count), [&](int, int) { return line; });
      EXPECT_EQ(sent, int64_t{40} * (count - 1));
    }
  }
}

TEST(ManyHosts, ScatterToTheSameBitsAsAnAllReduceAndExchangeDirectly) {
  for (const int count : {8, 9, 11, 37}) {
    // Of every dtype and operation once.
    const auto cases = count == 11 ? everyReduction(count, int64_t{3} * count) : std::vector<ReductionCase>();
    const auto body = [&](Communicator& communicator) {
      for (const auto& reduction : cases) {
        const at::Tensor given = reduction.given[communicator.rank()];
        at::Tensor output = at::empty({3}, given.options());
        communicator.reduceScatter(output, given, reduction.op);
        const at::Tensor expected = reduction.expected.narrow(0, int64_t{3} * communicator.rank(), 3);
        EXPECT_EQ(std::memcmp(output.const_data_ptr(), expected.const_data_ptr(), output.nbytes()), 0)
            << given.dtype() << ", operation " << static_cast<int>(reduction.op) << ", rank " << communicator.rank()
            << " of " << count;
      }
      const Traffic before = communicator.traffic();
      const at::Tensor input = at::arange(count, at::kInt) + communicator.rank() * 1000;
      at::Tensor output = at::empty({count}, at::kInt);
      at::Tensor received = bytesOf(output);
      const auto takeOwn = [&](int64_t, int64_t) { output[communicator.rank()] = input[communicator.rank()]; };
      communicator.allToAllInPieces(received, bytesOf(input), {}, {},
                                    {.beforeSending = [](int64_t, int64_t) {}, .afterReceiving = takeOwn});
      EXPECT_TRUE(at::equal(output, at::arange(count, at::kInt) * 1000 + communicator.rank()));
      EXPECT_EQ(communicator.traffic().since(before).betweenHostsBytes, (count - 1) * 4);
    };
    testing::runRanks(count, body, hostsOfOneRank(count), [&](int, int) { return kLines[0]; });
  }
}

TEST(ManyHosts, OfSeveralRanksGetTheSameBits) {
  // Uneven hosts: the lanes of a small one belong to few ranks.
  std::vector<std::string> hosts;
  for (int rank = 0; rank < 26; ++rank) hosts.push_back("host " + std::to_string(rank * rank % 13));
  std::vector<at::Tensor> results(hosts.size());
  for (const auto& line : kLines) {
    const auto body = [&](Communicator& communicator) {
      agreeOnLines(communicator);
      at::Tensor tensor = fractions(communicator.rank(), 5003, at::kBFloat16);
      communicator.allReduce(tensor, ReduceOp::AVG);
      results[communicator.rank()] = tensor;
      at::Tensor sum = contribution(communicator.rank(), 5003);
      communicator.allReduce(sum, ReduceOp::SUM);
      EXPECT_TRUE(at::equal(sum, sumOf(communicator.size(), 5003)));
    };
    const at::Tensor before = results.front();
    testing::runRanks(static_cast<int>(hosts.size()), body, hosts, [&](int, int) { return line; });
    for (const auto& result : results) EXPECT_TRUE(at::equal(result, results.front()));
    EXPECT_TRUE(!before.defined() || at::equal(before, results.front()));
  }
}

TEST(ManyHosts, SixteenBitFloatsAreRoundedOnce) {
  // 2048 + 1 is 2048 in half precision, so that rounding between the rounds would lose some of the ones.
  const auto body = [](Communicator& communicator) {
    agreeOnLines(communicator);
    at::Tensor tensor = at::full({20}, communicator.rank() == 0 ? 2048.0 : 1.0, at::kHalf);
    communicator.allReduce(tensor, ReduceOp::SUM);
    EXPECT_TRUE(tensor.eq(2048 + 10).all().item<bool>());
  };
  testing::runRanks(11, body, hostsOfOneRank(11), [](int, int) { return kLines[0]; });
}

TEST(ManyHosts, LeaveABarrierWhenTheLastHasCome) {
  for (int count = 2; count <= 17; ++count) {
    for (int late = 0; late < count; late += 5) {
      std::atomic<bool> hasCome{false};
      const auto body = [&](Communicator& communicator) {
        for (int call = 0; call < 3; ++call) communicator.barrier();
        if (communicator.rank() == late) {
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
          hasCome = true;
        }
        communicator.barrier();
        EXPECT_TRUE(hasCome) << "rank " << communicator.rank() << " of " << count;
      };
      testing::runRanks(count, body, hostsOfOneRank(count), [](int, int) { return kLines[0]; });
    }
  }
}

}  // namespace
}  // namespace bagua
