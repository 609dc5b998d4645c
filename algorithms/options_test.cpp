// SPDX-License-Identifier: Apache-2.0
#include "algorithms/options.h"

#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace bagua {
namespace {

using ::testing::HasSubstr;

const std::vector<OptionInfo> kDeclared = {
    {"average", true, ""}, {"interval", int64_t{3}, ""}, {"rate", 0.5, ""}, {"mode", std::string("all"), ""}};

std::string messageOf(const std::map<std::string, OptionValue>& given) {
  try {
    const Options options("test", kDeclared, given);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

TEST(Options, DefaultsFillWhatIsNotGiven) {
  const Options options("test", kDeclared, {{"average", false}});
  EXPECT_FALSE(options.get<bool>("average"));
  EXPECT_EQ(options.get<int64_t>("interval"), 3);
  EXPECT_EQ(options.get<std::string>("mode"), "all");
}

TEST(Options, AnIntegerServesWhereAFloatIsDeclared) {
  EXPECT_EQ(Options("test", kDeclared, {{"rate", int64_t{2}}}).get<double>("rate"), 2.0);
}

TEST(Options, AnUnknownNameListsTheValidOnes) {
  EXPECT_THROW(Options("test", kDeclared, {{"averge", true}}), c10::ValueError);
  EXPECT_THAT(messageOf({{"averge", true}}), HasSubstr("no option 'averge'"));
  EXPECT_THAT(messageOf({{"averge", true}}), HasSubstr("average, interval, rate, mode"));
}

TEST(Options, AnUnknownNameSaysWhatMayHaveBeenMeant) {
  EXPECT_THAT(messageOf({{"averge", true}}), HasSubstr("(did you mean 'average'?)"));
  EXPECT_NO_THROW(checkOptionName("test", kDeclared, "rate", {"optimizer"}));
  try {
    checkOptionName("test", kDeclared, "optmizer", {"optimizer"});
    FAIL() << "took a name that nobody takes";
  } catch (const c10::ValueError& error) {
    EXPECT_THAT(error.what(), HasSubstr("(did you mean 'optimizer'?)"));
  }
}

TEST(Options, AWrongTypeNamesBothTypes) {
  EXPECT_THROW(Options("test", kDeclared, {{"average", int64_t{1}}}), c10::TypeError);
  EXPECT_THAT(messageOf({{"interval", 1.5}}), HasSubstr("takes an int, got 1.5 (float)"));
}

TEST(Options, AnErrorNamesAllTypesThatAnOptionTakes) {
  const OptionValue none = std::string();
  EXPECT_EQ((OptionInfo{"interval", int64_t{3}, ""}.types()), "an int");
  EXPECT_EQ((OptionInfo{"codec", none, ""}.types()), "a str or None");
  EXPECT_EQ((OptionInfo{"guard", std::string("warn"), "", false, none}.types()), "a str or None");
  EXPECT_EQ((OptionInfo{"delay", std::string("auto"), "", false, int64_t{}}.types()), "a str or int");
  EXPECT_EQ((OptionInfo{"codec", std::string("4bit"), "", true}.types()), "a str or mapping");
}

TEST(Options, AFloatIsFinite) {
  for (const double wrong : {std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity(),
                             std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_THROW(Options("test", kDeclared, {{"rate", wrong}}), c10::ValueError);
    EXPECT_THAT(messageOf({{"rate", wrong}}), HasSubstr("'rate' of algorithm 'test' takes a finite number, got"));
  }
}

TEST(Options, TextIsTheSameForTheSameOptions) {
  const Options first("test", kDeclared, {{"average", true}});
  const Options second("test", kDeclared, {});
  EXPECT_EQ(first.toString(), second.toString());
  EXPECT_THAT(first.toString(), HasSubstr("average=True"));
}

TEST(Options, TextTellsNumbersApartWithAsFewDigitsAsThatTakes) {
  for (const double number : {0.123456789, -1e-9, 1e300}) {
    EXPECT_NE(toString(OptionValue(number)), toString(OptionValue(std::nextafter(number, 1)))) << number;
  }
  EXPECT_EQ(toString(OptionValue(0.7)), "0.7");
  EXPECT_EQ(toString(OptionValue(2.0)), "2");
  EXPECT_EQ(toString(OptionValue(0.1234567)), "0.1234567");
  EXPECT_EQ(toString(OptionValue(std::numeric_limits<double>::quiet_NaN())), "nan");
  EXPECT_EQ(toString(OptionValue(int64_t{1} << 40)), "1099511627776");
}

}  // namespace
}  // namespace bagua
