// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "algorithms/algorithm_interfaces.h"
#include "algorithms/registry.h"
#include "tests/support/immediate_steps.h"
#include "tests/support/thread_ranks.h"

namespace bagua {
namespace {

// Pairs go by the number of the exchange: with an interval they would else be the same ones in each.
TEST(Decentralized, PairsChangeFromExchangeToExchangeWhateverTheInterval) {
  const auto& info = AlgorithmRegistry::find("decentralized");
  constexpr int kRanks = 4;
  for (const int64_t interval : {1, 2, 3}) {
    testing::runRanks(kRanks, [&](Communicator& communicator) {
      const at::NoGradGuard noGrad;
      const std::vector<at::Tensor> weights = {at::full({5}, static_cast<float>(communicator.rank()))};
      testing::ImmediateSteps context(communicator, weights);
      const auto algorithm = info.create(Options(info.name, info.options,
                                                 {{"hierarchical", false},
                                                  {"peer_selection_mode", std::string("shift_one")},
                                                  {"communication_interval", interval}}));
      auto& onWeights = *algorithm->as<ActsOnWeights>();
      onWeights.useModel(context);
      // Two exchanges with different peers make all ranks equal.
      for (int64_t step = 0; step <= interval; ++step) {
        onWeights.beforeForward(context);
        onWeights.afterBackward(context);
      }
      EXPECT_TRUE(at::allclose(weights[0], at::full({5}, 1.5))) << "interval " << interval << ": " << weights[0];
    });
  }
}

struct Pairing {
  std::vector<std::string> hosts;
  bool hierarchical;
  // The error says these words. They are empty where there is none.
  std::string words;
};

TEST(Decentralized, PairsNeedAnEvenNumberOfRanksOrOfHostsWhereTheseTakePart) {
  const auto& info = AlgorithmRegistry::find("decentralized");
  const std::vector<Pairing> pairings = {
      {{"a", "a", "a"}, true, "pairs the ranks and needs an even number of them, got 3"},
      {{"a", "a", "b"}, false, "pairs the ranks and needs an even number of them, got 3"},
      {{"a", "a", "b", "c"}, true, "pairs the hosts (hierarchical=True) and needs an even number of them, got 3"},
      {{"a", "a", "b"}, true, ""},
      {{"a", "a", "b", "c"}, false, ""},
      {{"a"}, false, ""}};
  for (const auto& pairing : pairings) {
    testing::runRanks(
        static_cast<int>(pairing.hosts.size()),
        [&](Communicator& communicator) {
          const std::vector<at::Tensor> weights = {at::full({5}, 1.0)};
          testing::ImmediateSteps context(communicator, weights);
          const auto algorithm = info.create(
              Options(info.name, info.options,
                      {{"hierarchical", pairing.hierarchical}, {"peer_selection_mode", std::string("shift_one")}}));
          std::string said;
          try {
            algorithm->as<ActsOnWeights>()->useModel(context);
          } catch (const c10::ValueError& error) {
            said = error.what_without_backtrace();
          }
          EXPECT_EQ(said.empty(), pairing.words.empty()) << said;
          EXPECT_NE(said.find(pairing.words), std::string::npos) << said;
        },
        pairing.hosts);
  }
}

// Its averages are those of weights that are there no more, and in this step no other exchange takes its place.
TEST(Decentralized, AnExchangeThatBeganBeforeAStateWasLoadedDoesNotReplaceTheWeights) {
  const auto& info = AlgorithmRegistry::find("decentralized");
  for (const bool isLoaded : {false, true}) {
    testing::runRanks(2, [&](Communicator& communicator) {
      const at::NoGradGuard noGrad;
      const std::vector<at::Tensor> weights = {at::full({5}, static_cast<float>(communicator.rank()))};
      testing::ImmediateSteps context(communicator, weights);
      const auto algorithm = info.create(Options(info.name, info.options, {{"communication_interval", int64_t{2}}}));
      auto& onWeights = *algorithm->as<ActsOnWeights>();
      onWeights.useModel(context);
      onWeights.beforeForward(context);
      if (isLoaded) {
        weights[0].fill_(7);
        algorithm->as<KeepsState>()->load({{"step", counterTensor(1)}, {"exchanges", counterTensor(1)}}, context);
      }
      onWeights.beforeForward(context);
      onWeights.afterBackward(context);
      EXPECT_TRUE(weights[0].eq(isLoaded ? 7 : 0.5).all().item<bool>()) << isLoaded << " " << weights[0];
    });
  }
}

}  // namespace
}  // namespace bagua
