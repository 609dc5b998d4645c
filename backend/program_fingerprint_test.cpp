// SPDX-License-Identifier: Apache-2.0
#include "backend/program_fingerprint.h"

#include <gtest/gtest.h>

#include <memory>

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
  const std::string fits(47, 'x');
  EXPECT_EQ(withConfiguration(fits).configuration, fits);
  EXPECT_EQ(withConfiguration(fits + "y").configuration, std::string(44, 'x') + "...");
}

TEST(ProgramFingerprint, TellsConfigurationsApartThatDifferInWhatIsCut) {
  const std::string same(60, 'x');
  EXPECT_NE(withConfiguration(same + "1").hash(), withConfiguration(same + "2").hash());
}

}  // namespace
}  // namespace bagua
