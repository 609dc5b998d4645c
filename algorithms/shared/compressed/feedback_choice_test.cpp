// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/compressed/feedback_choice.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

namespace bagua::compressed {
namespace {

bool isOn(const FeedbackChoice& choice, const std::string& codec) { return choice.isOnFor(CodecRegistry::find(codec)); }

TEST(FeedbackChoice, GoesByBitsAndOptimizerAsMeasured) {
  FeedbackChoice choice{std::string("auto")};
  const std::map<std::string, bool> unknown = {
      {"minmax_uint8", false}, {"int8", false}, {"4bit", true}, {"2bit", false}, {"1bit", false}};
  for (const auto& [codec, expected] : unknown) EXPECT_EQ(isOn(choice, codec), expected) << codec;
  choice.useOptimizer(true);
  for (const auto& [codec, expected] : unknown) EXPECT_EQ(isOn(choice, codec), expected || codec == "2bit") << codec;
}

TEST(FeedbackChoice, IsTheUsersWhereTheySay) {
  for (const bool isWanted : {false, true}) {
    for (const std::string codec : {"int8", "4bit", "1bit"}) EXPECT_EQ(isOn(FeedbackChoice(isWanted), codec), isWanted);
  }
  EXPECT_THROW(FeedbackChoice(std::string("on")), c10::ValueError);
}

}  // namespace
}  // namespace bagua::compressed
