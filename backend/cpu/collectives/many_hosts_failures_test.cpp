// SPDX-License-Identifier: Apache-2.0
// Failures among more ranks than speak with each other in an operation, over our own transport.
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <cstdlib>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "backend/cpu/collectives/cpu_communicator.h"
#include "backend/cpu/cpu_executor.h"
#include "backend/cpu/make_cpu_executor.h"
#include "backend/cpu/messages.h"
#include "backend/cpu/socket_wire.h"

namespace bagua {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

constexpr int kRanks = 21;
constexpr int kCallsBefore = 3;

// A call on `numel` ones of each rank for each place where they go, and whether what came is right.
struct Call {
  const char* name;
  c10d::OpType type;
  int64_t numel;
  bool (*make)(Communicator& communicator, int64_t numel);
};

bool allReduce(Communicator& communicator, int64_t numel) {
  at::Tensor tensor = at::ones({numel});
  communicator.allReduce(tensor, c10d::ReduceOp::SUM);
  return tensor.eq(kRanks).all().item<bool>();
}

// Those that only send may be through before anybody finds fault: they hear of it in the barrier.
bool reduce(Communicator& communicator, int64_t numel) {
  constexpr int kRoot = 5;
  at::Tensor tensor = at::ones({numel});
  communicator.reduce(tensor, kRoot, c10d::ReduceOp::SUM);
  communicator.barrier();
  return tensor.eq(communicator.rank() == kRoot ? kRanks : 1).all().item<bool>();
}

bool reduceScatter(Communicator& communicator, int64_t numel) {
  at::Tensor output = at::zeros({numel});
  communicator.reduceScatter(output, at::ones({numel * kRanks}), c10d::ReduceOp::SUM);
  return output.eq(kRanks).all().item<bool>();
}

// As codecs exchange what they have packed.
bool exchangePieces(Communicator& communicator, int64_t numel) {
  const at::Tensor input = at::ones({numel * kRanks}, at::kByte);
  at::Tensor output = at::zeros({numel * kRanks}, at::kByte);
  const auto takeOwn = [&](int64_t, int64_t) { output.narrow(0, numel * communicator.rank(), numel).fill_(1); };
  communicator.allToAllInPieces(output, input, {}, {},
                                {.beforeSending = [](int64_t, int64_t) {}, .afterReceiving = takeOwn});
  return output.eq(1).all().item<bool>();
}

// A rank with a transport of its own, as in a process of its own, on a host of its own.
class Rank {
 public:
  Rank(int rank, const std::shared_ptr<net::Transport>& transport, const std::vector<net::ProcessAddress>& addresses,
       const c10::intrusive_ptr<c10d::Store>& store)
      : identity_{.name = "pg", .rank = rank, .size = kRanks}, health_(identity_, store) {
    const auto group = transport->join(11, rank, addresses);
    const auto log = health_.addLog("cpu", [weak = std::weak_ptr<net::Group>(group)] {
      const auto present = weak.lock();
      return present ? present->findLost() : std::nullopt;
    });
    CpuExecutor::Communicators channels;
    channels.push_back(
        std::make_unique<CpuCommunicator>(std::make_unique<SocketWire>(group),
                                          std::make_shared<const HostTopology>(HostTopology::oneRankPerHost(kRanks))));
    auto messenger = std::make_unique<Messenger>(identity_, std::make_unique<Messages>(group), log);
    executor_ = std::make_shared<CpuExecutor>(identity_, std::move(channels), std::move(messenger), log);
    endWithGroup(executor_, *log);
  }

  // Each of `kCallsBefore` is complete on all ranks when this returns: a rank that fails ends the others in what they
  // have not completed.
  void makeCallsBefore(const Call& call, std::barrier<>& all) {
    for (int done = 0; done < kCallsBefore; ++done) EXPECT_EQ(make(call), "");
    all.arrive_and_wait();
  }

  // The error of a call; empty where there was none and the result is right.
  std::string make(const Call& call) {
    Operation operation{.type = call.type,
                        .name = call.name,
                        .dtype = at::kFloat,
                        .numel = call.numel,
                        .timeout = std::chrono::seconds(60)};
    operation.commonNumel = call.numel;
    // A program may outlive the work that has failed.
    const auto isRight = std::make_shared<std::atomic<bool>>(false);
    try {
      executor_
          ->submit(operation, {},
                   [call, isRight](Communicator& communicator) { *isRight = call.make(communicator, call.numel); })
          ->wait(kNoTimeout);
    } catch (const std::exception& error) {
      return error.what();
    }
    return *isRight ? "" : "a wrong result";
  }

 private:
  const GroupIdentity identity_;
  GroupHealth health_;
  std::shared_ptr<CpuExecutor> executor_;
};

// What each rank of a new group says at the end. `all` is where its ranks meet.
std::vector<std::string> runRanks(
    const std::function<std::string(int rank, Rank& self, net::Transport& transport, std::barrier<>& all)>& body) {
  // Failures on purpose leave no files.
  ::setenv("TORCH_FR_DUMP_ON_TIMEOUT", "0", 1);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::shared_ptr<net::Transport>> transports;
  std::vector<net::ProcessAddress> addresses;
  for (int rank = 0; rank < kRanks; ++rank) {
    transports.push_back(net::Transport::listenAt("127.0.0.1", 2));
    addresses.push_back(transports.back()->address());
  }
  std::vector<std::string> said(kRanks);
  std::barrier<> all(kRanks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      Rank self(rank, transports[rank], addresses, store);
      said[rank] = body(rank, self, *transports[rank], all);
    });
  }
  for (auto& thread : threads) thread.join();
  return said;
}

// Sizes that go whole and in parts, in rounds.
class FailuresAmongManyHosts : public ::testing::TestWithParam<Call> {
 protected:
  static Call ofSize(int64_t numel) {
    Call call = GetParam();
    call.numel = numel;
    return call;
  }
};

TEST_P(FailuresAmongManyHosts, AMismatchEndsAllRanksAndNamesTheOneThatDiffers) {
  constexpr int kOdd = 20;
  const auto said = runRanks([&](int rank, auto& self, auto&, auto& all) {
    self.makeCallsBefore(GetParam(), all);
    return self.make(ofSize(GetParam().numel + (rank == kOdd ? 4 : 0)));
  });
  EXPECT_THAT(said, Each(HasSubstr("rank " + std::to_string(kOdd))));
  EXPECT_THAT(said, Each(HasSubstr(std::to_string(GetParam().numel + 4))));
}

// The ranks that speak with each other are not the same for both sizes.
TEST_P(FailuresAmongManyHosts, AMismatchIsFoundWhereAnotherSizeTakesAnotherWay) {
  constexpr int kOdd = 9;
  const auto said = runRanks([&](int rank, auto& self, auto&, auto& all) {
    const int64_t other = GetParam().numel == 100 ? 400'000 : 100;
    self.makeCallsBefore(GetParam(), all);
    return self.make(rank == kOdd ? ofSize(other) : GetParam());
  });
  EXPECT_THAT(said, Each(HasSubstr("do not make the same call")));
}

TEST_P(FailuresAmongManyHosts, ARankThatDiesEndsAllOthers) {
  const auto said = runRanks([&](int rank, auto& self, auto& transport, auto& all) {
    self.makeCallsBefore(GetParam(), all);
    if (rank != 13) return self.make(GetParam());
    // As the kernel ends the connections of a process.
    transport.loseLinksForTest();
    return std::string("Connection closed by peer");
  });
  EXPECT_THAT(said, Each(::testing::AnyOf(HasSubstr("Connection closed by peer"), HasSubstr("rank 13"))));
}

// Within the time that it may take, nobody gives up a rank that is only late.
TEST_P(FailuresAmongManyHosts, ARankThatIsLateIsWaitedFor) {
  const auto said = runRanks([&](int rank, auto& self, auto&, auto&) {
    if (rank == 13) std::this_thread::sleep_for(std::chrono::seconds(1));
    return self.make(GetParam());
  });
  EXPECT_THAT(said, Each(""));
}

INSTANTIATE_TEST_SUITE_P(Calls, FailuresAmongManyHosts,
                         ::testing::Values(Call{"bagua:all_reduce", c10d::OpType::ALLREDUCE, 100, allReduce},
                                           Call{"bagua:all_reduce", c10d::OpType::ALLREDUCE, 400'000, allReduce},
                                           Call{"bagua:reduce", c10d::OpType::REDUCE, 100, reduce},
                                           Call{"bagua:reduce_scatter", c10d::OpType::REDUCE_SCATTER, 100,
                                                reduceScatter},
                                           Call{"bagua:reduce_bucket", c10d::OpType::ALLTOALL, 100, exchangePieces}),
                         [](const auto& call) {
                           return std::string(call.param.name).substr(6) + "_of_" + std::to_string(call.param.numel);
                         });

}  // namespace
}  // namespace bagua
