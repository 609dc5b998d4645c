// SPDX-License-Identifier: Apache-2.0
#include "backend/operation/program_fingerprint.h"

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backend/operation/peer_errors.h"

namespace bagua {
namespace {

ProgramFingerprint withConfiguration(const std::string& text) {
  Operation operation{.name = "bagua:reduce_bucket", .dtype = at::kFloat, .numel = 8, .sequence = 3};
  operation.configuration = std::make_shared<const std::string>(text);
  return fingerprintOf(operation);
}

TEST(ProgramFingerprint, SaysWhatIsCalled) {
  EXPECT_EQ(describe(withConfiguration("bytegrad(average=True)")),
            "bagua:reduce_bucket #3 (Float[8], bytegrad(average=True))");
}

TEST(ProgramFingerprint, AConfigurationThatDoesNotFitEndsInDots) {
  const std::string fits(sizeof(ProgramFingerprint::configuration) - 1, 'x');
  EXPECT_EQ(withConfiguration(fits).configuration, fits);
  EXPECT_EQ(withConfiguration(fits + "y").configuration, fits.substr(3) + "...");
}

ProgramFingerprint ofBucket(const std::string& gradients, uint32_t hash, uint32_t step) {
  Operation operation{.name = "bagua:reduce_bucket", .dtype = at::kFloat, .numel = 8, .sequence = 3};
  operation.gradients = std::make_shared<const GradientList>(GradientList{.text = gradients, .hash = hash});
  operation.step = step;
  return fingerprintOf(operation);
}

std::string mismatchOf(const ProgramFingerprint& one, const ProgramFingerprint& other) {
  try {
    checkSameProgram(one, "rank 0", other, "rank 1");
    return "";
  } catch (const MismatchError& error) {
    return error.what_without_backtrace();
  }
}

TEST(ProgramFingerprint, WhateverDiffersIsAMismatchThatShowsBoth) {
  Operation usual{.name = "bagua:all_reduce", .dtype = at::kFloat, .numel = 4, .sequence = 2};
  usual.reduceOp = static_cast<int>(c10d::ReduceOp::SUM);
  const std::vector<std::pair<std::function<void(Operation&)>, std::string>> changes{
      {[](Operation& other) { other.name = "bagua:reduce"; }, "bagua:reduce #2 (Float[4], sum)"},
      {[](Operation& other) { other.dtype = at::kInt; }, "bagua:all_reduce #2 (Int[4], sum)"},
      {[](Operation& other) { other.numel = 5; }, "bagua:all_reduce #2 (Float[5], sum)"},
      {[](Operation& other) { other.reduceOp = static_cast<int>(c10d::ReduceOp::MAX); },
       "bagua:all_reduce #2 (Float[4], max)"},
      {[](Operation& other) { other.peer = 0; }, "bagua:all_reduce #2 (Float[4], sum, peer rank 0)"},
      {[](Operation& other) { other.sequence = 3; }, "bagua:all_reduce #3 (Float[4], sum)"}};
  for (const auto& [change, shown] : changes) {
    Operation other = usual;
    change(other);
    const auto message = mismatchOf(fingerprintOf(usual), fingerprintOf(other));
    const std::string both = "rank 0 is in bagua:all_reduce #2 (Float[4], sum), rank 1 in " + shown + ". ";
    EXPECT_NE(message.find(both), std::string::npos) << shown << ": " << message;
  }
}

TEST(ProgramFingerprint, BucketsOfOtherGradientsAreAMismatchThatSaysWhatToLoad) {
  EXPECT_EQ(mismatchOf(ofBucket("5-0", 7, 2), ofBucket("5-0", 7, 2)), "");
  const auto message = mismatchOf(ofBucket("5-3|2-0", 7, 2), ofBucket("5-0", 8, 2));
  EXPECT_NE(message.find("rank 0 is in bagua:reduce_bucket #3 (Float[8], gradients 5-3|2-0)"), std::string::npos)
      << message;
  EXPECT_NE(message.find("rank 1 in bagua:reduce_bucket #3 (Float[8], gradients 5-0)"), std::string::npos) << message;
  EXPECT_NE(message.find("bucket layouts differ"), std::string::npos) << message;
  EXPECT_NE(message.find("Load the handle's state_dict on all ranks"), std::string::npos) << message;
}

TEST(ProgramFingerprint, OtherStepsOfAnAlgorithmAreAMismatchThatNamesBoth) {
  const auto message = mismatchOf(ofBucket("", 0, 2), ofBucket("", 0, 12));
  EXPECT_NE(message.find("at step 2 and step 12"), std::string::npos) << message;
  EXPECT_EQ(message.find("bucket layouts"), std::string::npos) << message;
  // A user has nothing to load where only one of them is a hook's.
  const auto unlike = mismatchOf(ofBucket("5-0", 7, 2), withConfiguration("2 x 6"));
  EXPECT_NE(unlike.find("All ranks have to make the same calls in the same order"), std::string::npos) << unlike;
  EXPECT_EQ(unlike.find("at step"), std::string::npos) << unlike;
}

TEST(ProgramFingerprint, TellsConfigurationsApartThatDifferInWhatIsCut) {
  const std::string same(60, 'x');
  EXPECT_NE(withConfiguration(same + "1").hash(), withConfiguration(same + "2").hash());
}

}  // namespace
}  // namespace bagua
