// SPDX-License-Identifier: Apache-2.0
#include "backend/operation/program_fingerprint.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>

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
  // Where one of them is no hook's there is nothing to load.
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
