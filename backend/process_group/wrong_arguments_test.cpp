// SPDX-License-Identifier: Apache-2.0
// What is handed in wrongly raises before anything is communicated, and the error says where.
#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "backend/process_group/process_group_bagua.h"
#include "backend/rendezvous/rank_record.h"

namespace bagua {
namespace {

using ::testing::HasSubstr;

// Rank 0 of two. The other one cannot be reached, so that nothing arrives from a call which is not refused.
class WrongArguments : public ::testing::Test {
 protected:
  using Tensors = std::vector<at::Tensor>;
  using Splits = std::vector<int64_t>;

  WrongArguments() {
    const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
    store->set("thread/1", std::string("none: it is not there"));
    const auto options = c10::make_intrusive<ProcessGroupBagua::Options>();
    options->records = {ownRecord(), ownRecord()};
    group_ = c10::make_intrusive<ProcessGroupBagua>(store, 0, 2, options);
  }
  void TearDown() override { EXPECT_EQ(group_->getSequenceNumberForGroup(), 0U); }

  template <typename Error = c10::ValueError>
  static void isRefused(const std::string& name, const std::string& why, const std::function<void()>& call) {
    SCOPED_TRACE(name + ": " + why);
    try {
      call();
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("bagua:" + name + " on rank 0 of 2: "));
      EXPECT_THAT(error.what(), HasSubstr(why));
    }
  }
  void allReduce(at::Tensor tensor) {
    Tensors tensors{std::move(tensor)};
    group_->allreduce(tensors, {});
  }
  void broadcast(at::Tensor tensor, int64_t root) {
    Tensors tensors{std::move(tensor)};
    group_->broadcast(tensors, {.rootRank = root});
  }
  void reduce(at::Tensor tensor, int64_t root) {
    Tensors tensors{std::move(tensor)};
    group_->reduce(tensors, {.rootRank = root});
  }
  void allGather(Tensors outputs, at::Tensor input) {
    std::vector<Tensors> lists{std::move(outputs)};
    Tensors inputs{std::move(input)};
    group_->allgather(lists, inputs, {});
  }
  void allGatherInto(at::Tensor output, at::Tensor input) { group_->_allgather_base(output, input, {}); }
  void reduceScatter(at::Tensor output, Tensors inputs) {
    Tensors outputs{std::move(output)};
    std::vector<Tensors> lists{std::move(inputs)};
    group_->reduce_scatter(outputs, lists, {});
  }
  void reduceScatterOf(at::Tensor output, at::Tensor input) { group_->_reduce_scatter_base(output, input, {}); }
  void allToAll(Tensors outputs, Tensors inputs) { group_->alltoall(outputs, inputs, {}); }
  void allToAllSingle(at::Tensor output, at::Tensor input, Splits outputSplits = {}, Splits inputSplits = {}) {
    group_->alltoall_base(output, input, outputSplits, inputSplits, {});
  }
  void send(at::Tensor tensor, int destination) {
    Tensors tensors{std::move(tensor)};
    group_->send(tensors, destination, 0);
  }
  void receive(at::Tensor tensor, int source) {
    Tensors tensors{std::move(tensor)};
    group_->recv(tensors, source, 0);
  }
  void receiveFromAny(at::Tensor tensor) {
    Tensors tensors{std::move(tensor)};
    group_->recvAnysource(tensors, 0);
  }

  c10::intrusive_ptr<ProcessGroupBagua> group_;
};

TEST_F(WrongArguments, WhatIsWrittenToHasToBeDense) {
  const at::Tensor plain = at::ones({6, 4});
  const at::Tensor odd = at::ones({4, 6}).t();
  const std::string why = "must be contiguous, got sizes [6, 4] with strides [1, 6]";
  isRefused("all_reduce", why, [&] { allReduce(odd); });
  isRefused("broadcast", why, [&] { broadcast(odd, 0); });
  isRefused("reduce", why, [&] { reduce(odd, 0); });
  isRefused("all_gather", why, [&] { allGather({odd, odd}, plain); });
  isRefused("reduce_scatter", why, [&] { reduceScatter(odd, {plain, plain}); });
  isRefused("reduce_scatter_tensor", why, [&] { reduceScatterOf(odd, at::ones({12, 4})); });
  isRefused("all_to_all", why, [&] { allToAll({odd, odd}, {plain, plain}); });
}

// Where it goes by rows, or the two ends may store it in different orders.
TEST_F(WrongArguments, WhatIsDenseInAnotherOrderIsNotEnoughForAll) {
  const at::Tensor plain = at::ones({2, 3, 4, 5});
  const at::Tensor odd = plain.contiguous(at::MemoryFormat::ChannelsLast);
  const at::Tensor twice = at::ones({4, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast);
  const std::string why = "must be contiguous in row-major order, got sizes [";
  isRefused("all_gather_into_tensor", why, [&] { allGatherInto(twice, plain); });
  isRefused("all_gather_into_tensor_coalesced", why, [&] {
    Tensors outputs{twice};
    Tensors inputs{plain};
    group_->allgather_into_tensor_coalesced(outputs, inputs, {});
  });
  isRefused("all_to_all_single", why, [&] { allToAllSingle(odd, plain); });
  isRefused("send", why, [&] { send(odd, 1); });
  isRefused("recv", why, [&] { receive(odd, 1); });
  isRefused("recvAnySource", why, [&] { receiveFromAny(odd); });
}

TEST_F(WrongArguments, SizesHaveToFit) {
  const auto of = [](int64_t size) { return at::ones({size}); };
  isRefused("all_gather_into_tensor", "output must have 6 elements, got 5", [&] { allGatherInto(of(5), of(3)); });
  isRefused("all_gather", "expected 2 output tensors, one per rank, got 3", [&] {
    allGather({of(3), of(3), of(3)}, of(3));
  });
  isRefused("all_gather", "output of this rank must be of sizes [3], got [4]", [&] {
    allGather({of(4), of(3)}, of(3));
  });
  isRefused("all_gather_coalesced", "output must be of sizes [3], got [4]", [&] {
    std::vector<Tensors> outputs{{of(3)}, {of(4)}};
    Tensors inputs{of(3)};
    group_->allgather_coalesced(outputs, inputs, {});
  });
  isRefused("reduce_scatter_tensor", "input must have 6 elements, got 7", [&] { reduceScatterOf(of(3), of(7)); });
  isRefused("reduce_scatter", "expected 2 input tensors, one per rank, got 1", [&] { reduceScatter(of(3), {of(3)}); });
  isRefused("reduce_scatter", "input of this rank must be of sizes [3], got [4]", [&] {
    reduceScatter(of(3), {of(4), of(3)});
  });
  isRefused("all_to_all", "expected 2 output tensors, one per rank, got 3", [&] {
    allToAll({of(3), of(3), of(3)}, {of(3), of(3)});
  });
  isRefused("all_to_all", "output of this rank must have 3 elements, got 2", [&] {
    allToAll({of(2), of(2)}, {of(3), of(3)});
  });
}

TEST_F(WrongArguments, SplitsHaveToBePartsOfTheTensor) {
  const at::Tensor four = at::ones({4});
  const auto isRefusedWith = [&](const std::string& why, const Splits& outputs, const Splits& inputs) {
    isRefused("all_to_all_single", why, [&] { allToAllSingle(at::ones({4}), four, outputs, inputs); });
  };
  isRefusedWith("split sizes of input must add up to the size of its dimension 0, 4, got 5", {2, 2}, {2, 3});
  isRefusedWith("split sizes of output must add up to the size of its dimension 0, 4, got 2", {1, 1}, {2, 2});
  isRefusedWith("expected 2 split sizes, one per rank, got 1", {2, 2}, {4});
  isRefusedWith("split sizes of input must not be negative, got -1", {5, -1}, {5, -1});
  isRefusedWith("this rank sends itself 4 elements of input and expects 2 in output", {2, 2}, {4, 0});
  isRefused("all_to_all_single", "dimension 0 of input has size 3, which does not divide evenly among 2 ranks",
            [&] { allToAllSingle(four, at::ones({3})); });
}

TEST_F(WrongArguments, DtypesHaveToBeThoseOfTheOthers) {
  const at::Tensor one = at::ones({3});
  const at::Tensor odd = at::ones({6}, at::kDouble);
  isRefused<c10::TypeError>("all_gather_into_tensor", "output must be of dtype Float like the others, got Double",
                            [&] { allGatherInto(odd, one); });
  isRefused<c10::TypeError>("reduce_scatter_tensor", "input must be of dtype Float like the others, got Double",
                            [&] { reduceScatterOf(one, odd); });
}

TEST_F(WrongArguments, RanksHaveToBeThoseOfTheGroup) {
  const at::Tensor one = at::ones({3});
  isRefused("broadcast", "root rank must be in [0, 2), got 2", [&] { broadcast(one, 2); });
  isRefused("reduce", "root rank must be in [0, 2), got 7", [&] { reduce(one, 7); });
  isRefused("send", "destination rank must be in [0, 2), got 2", [&] { send(one, 2); });
  isRefused("send", "destination rank must be in [0, 2), got -1", [&] { send(one, -1); });
  isRefused("send", "a rank cannot send to itself", [&] { send(one, 0); });
  isRefused("recv", "source rank must be in [0, 2), got 2", [&] { receive(one, 2); });
  isRefused("recv", "a rank cannot receive from itself", [&] { receive(one, 0); });
}

}  // namespace
}  // namespace bagua
