// SPDX-License-Identifier: Apache-2.0
// These tests ask which steps a CUDA graph may hold, of a group that says that its stream is captured.
#include "algorithms/capture.h"

#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "algorithms/hook/hook_runner.h"
#include "algorithms/registry.h"
#include "algorithms/shared/flat_reduction.h"
#include "tests/support/immediate_group.h"

namespace bagua {
namespace {

using ::testing::HasSubstr;
using testing::ImmediateGroup;
using Given = std::map<std::string, OptionValue>;

struct Case {
  std::string algorithm;
  Given options;
  bool isReplayable;
};

// The test fails for an algorithm that is not listed: whoever adds one has to decide whether it is replayable.
std::vector<Case> cases() {
  return {{"gradient_allreduce", {}, true},
          {"bytegrad", {}, true},
          {"bytegrad", {{"codec", std::string("4bit")}}, true},
          {"bytegrad", {{"codec", std::string("2bit")}}, false},
          {"bytegrad", {{"codec", std::string("1bit")}}, false},
          {"bytegrad", {{"start_step", int64_t{1}}}, false},
          {"quantized_allreduce", {}, false},
          {"quantized_allreduce", {{"residuals", std::string("8bit")}}, false},
          {"quantized_allreduce", {{"error_feedback", false}}, true},
          {"quantized_allreduce", {{"error_feedback", false}, {"start_step", int64_t{1}}}, false},
          {"quantized_allreduce", {{"codec", std::string("int8")}}, true},
          {"quantized_allreduce", {{"error_feedback", false}, {"codec", std::string("2bit")}}, false},
          {"quantized_allreduce", {{"error_feedback", false}, {"codec", std::string("a=1bit, *=4bit")}}, false},
          {"quantized_allreduce", {{"error_feedback", false}, {"rounding", std::string("stochastic")}}, false},
          {"quantized_allreduce",
           {{"error_feedback", false}, {"codec", std::string("minmax_uint8")}, {"rounding", std::string("stochastic")}},
           true},
          {"powersgd", {}, false},
          {"qadam", {}, false},
          {"decentralized", {}, true},
          {"decentralized", {{"peer_selection_mode", std::string("shift_one")}}, false},
          {"decentralized", {{"communication_interval", int64_t{2}}}, false},
          {"low_precision_decentralized", {}, false},
          {"async", {}, false},
          {"local_sgd", {}, false},
          {"diloco", {}, false}};
}

struct Runner {
  explicit Runner(const Case& it)
      : group(std::make_shared<ImmediateGroup>(std::vector<std::string>{"a", "b"})),
        parameters({at::ones({3})}),
        runner(it.algorithm, it.options, group, parameters) {}

  void reduce() {
    const at::Tensor flat = at::ones({3});
    runner.reduceBucket(flat, {{0, flat}}, true, true);
  }

  std::shared_ptr<ImmediateGroup> group;
  std::vector<at::Tensor> parameters;
  HookRunner runner;
};

template <typename Call>
std::string textOf(Call&& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return {};
}

TEST(Capture, EveryRegisteredAlgorithmSaysWhetherItsStepsMayBeReplayed) {
  std::set<std::string> left;
  for (const auto& name : AlgorithmRegistry::names()) left.insert(name);
  for (const char* const ofTests : {"watching", "retaining", "slow"}) left.erase(ofTests);
  for (const auto& [name, options, isReplayable] : cases()) {
    left.erase(name);
    const auto& info = AlgorithmRegistry::find(name);
    const Options all(name, info.options, options);
    EXPECT_EQ(info.create(all)->traits().isReplayable, isReplayable) << name << "(" << all.toString() << ")";
  }
  EXPECT_THAT(left, ::testing::IsEmpty());
}

TEST(Capture, AStepThatIsNotLikeTheNextIsRefusedBeforeAnythingIsSubmitted) {
  for (const auto& it : cases()) {
    if (it.isReplayable) continue;
    Runner captured(it);
    captured.group->capturing = true;
    const auto text = textOf([&] { captured.reduce(); });
    EXPECT_THAT(text, HasSubstr("algorithm " + it.algorithm + "(")) << it.algorithm;
    EXPECT_THAT(text, HasSubstr("cannot be captured in a CUDA graph")) << it.algorithm;
    EXPECT_EQ(captured.runner.stats().buckets, 0) << it.algorithm;
    EXPECT_EQ(captured.runner.step(), 0) << it.algorithm;
    EXPECT_THAT(captured.group->programs, ::testing::IsEmpty()) << it.algorithm;
  }
}

// In such a step nothing travels; a graph of it would keep the weights of the ranks apart for ever.
TEST(Capture, AStepInWhichNothingTravelsIsRefusedToo) {
  Runner captured({"decentralized", {{"communication_interval", int64_t{2}}}, false});
  captured.runner.beforeForward({});
  captured.runner.afterBackward();
  captured.group->capturing = true;
  EXPECT_THAT(textOf([&] { captured.runner.beforeForward({}); }), HasSubstr("communication_interval=2"));
  EXPECT_THAT(textOf([&] { captured.runner.afterBackward(); }), HasSubstr("communication_interval=2"));
  EXPECT_THAT(textOf([&] { captured.runner.afterStep(); }), HasSubstr("communication_interval=2"));
  captured.group->capturing = false;
  captured.runner.beforeForward({});
}

TEST(Capture, AStepThatIsLikeTheNextIsRecorded) {
  for (const auto& it : cases()) {
    if (!it.isReplayable || !AlgorithmRegistry::find(it.algorithm).optimizer.empty()) continue;
    Runner captured(it);
    captured.group->capturing = true;
    captured.reduce();
    EXPECT_EQ(captured.group->programs.size(), 1) << it.algorithm;
  }
}

TEST(Capture, AReductionOfOneTensorIsRecorded) {
  ImmediateGroup group({"a", "b"});
  group.capturing = true;
  reduceFlat(group, at::ones({3}), true, {});
  EXPECT_EQ(group.programs.size(), 1);
}

}  // namespace
}  // namespace bagua
