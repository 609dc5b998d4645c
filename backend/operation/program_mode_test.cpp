// SPDX-License-Identifier: Apache-2.0
#include "backend/operation/program_mode.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

namespace bagua {
namespace {

at::ScalarType typeOfAProduct() {
  const at::Tensor ones = at::ones({1, 2, 2});
  return at::bmm(ones, ones).scalar_type();
}

// This is the state of a backward inside of `with torch.autocast("cpu")`.
class ProgramModeUnderAutocast : public ::testing::Test {
 protected:
  ProgramModeUnderAutocast() { at::autocast::set_autocast_enabled(at::kCPU, true); }
  ~ProgramModeUnderAutocast() override { at::autocast::set_autocast_enabled(at::kCPU, false); }
};

TEST_F(ProgramModeUnderAutocast, AProgramMultipliesInTheTypeOfItsTensors) {
  const ProgramMode mode({at::ones({2})});
  EXPECT_EQ(typeOfAProduct(), at::kFloat);
}

TEST_F(ProgramModeUnderAutocast, TheCallerHasItBackBehindAProgramInEitherMode) {
  { const ProgramMode mode({at::ones({2})}); }
  EXPECT_EQ(typeOfAProduct(), at::kBFloat16);
  const c10::InferenceMode callers;
  const at::Tensor inferred = at::ones({2});
  const c10::InferenceMode withoutIt(false);
  { const ProgramMode mode({inferred}); }
  EXPECT_EQ(typeOfAProduct(), at::kBFloat16);
}

}  // namespace
}  // namespace bagua
