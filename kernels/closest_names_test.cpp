// SPDX-License-Identifier: Apache-2.0
#include "kernels/closest_names.h"

#include <gtest/gtest.h>

namespace bagua {
namespace {

const std::vector<std::string> kNames = {"gradient_allreduce", "bytegrad", "powersgd", "local_sgd", "4bit", "2bit",
                                         "minmax_uint8"};

TEST(SuggestionFor, ASlipOfTheFingerHasOneAnswer) {
  for (const char* slip : {"bytegard", "byte_grad", "ByteGrad", "bytegrad ", "byetgrad"})
    EXPECT_EQ(suggestionFor(slip, kNames), " (did you mean 'bytegrad'?)") << slip;
  EXPECT_EQ(suggestionFor("minmax_unit8", kNames), " (did you mean 'minmax_uint8'?)");
  EXPECT_EQ(suggestionFor("local-sgd", kNames), " (did you mean 'local_sgd'?)");
}

TEST(SuggestionFor, APartOfANameLeadsToIt) {
  EXPECT_EQ(suggestionFor("allreduce", kNames), " (did you mean 'gradient_allreduce'?)");
  EXPECT_EQ(suggestionFor("sgd", kNames), " (did you mean 'powersgd' or 'local_sgd'?)");
}

TEST(SuggestionFor, EquallyCloseNamesAreAllSaid) {
  EXPECT_EQ(suggestionFor("bit", kNames), " (did you mean '4bit' or '2bit'?)");
}

TEST(SuggestionFor, AnotherDigitIsNoSlip) { EXPECT_EQ(suggestionFor("8bit", kNames), ""); }

TEST(SuggestionFor, WhatResemblesNothingHasNone) {
  for (const char* other : {"", "x", "adam", "horovod"}) EXPECT_EQ(suggestionFor(other, kNames), "") << other;
  EXPECT_EQ(suggestionFor("bytegrad", {}), "");
}

}  // namespace
}  // namespace bagua
