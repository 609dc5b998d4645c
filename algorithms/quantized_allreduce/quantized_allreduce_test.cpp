// SPDX-License-Identifier: Apache-2.0
// Which gradients the options choose. What becomes of them is in tests/multiprocess/test_quantized_allreduce.py.
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>

#include "algorithms/quantized_allreduce/selection.h"

namespace bagua::quantized {
namespace {

using ::testing::HasSubstr;

at::Tensor matrix() { return at::zeros({64, 64}); }

TEST(Selection, KeepsExactWhatTheWordsName) {
  Selection selection("4bit", "1d, embedding,small , block?.norm*");
  selection.useParameters({{"wte.weight", "embedding"}, {"block1.norm.weight", ""}, {"fc.weight", "head"}});
  EXPECT_EQ(selection.codecOf(0, matrix()), "");
  EXPECT_EQ(selection.codecOf(1, matrix()), "");
  EXPECT_EQ(selection.codecOf(2, matrix()), "4bit");
  EXPECT_EQ(selection.codecOf(2, at::zeros({5000})), "");
  EXPECT_EQ(selection.codecOf(2, at::zeros({31, 33})), "");
  EXPECT_EQ(selection.codecOf(2, at::zeros({32, 32})), "4bit");
}

TEST(Selection, TakesTheFirstPatternThatFits) {
  Selection selection("*.bias=int8, conv*=2bit, *=1bit", "");
  selection.useParameters({{"conv1.bias", ""}, {"conv1.weight", ""}, {"fc.weight", ""}});
  EXPECT_EQ(selection.codecOf(0, at::zeros({3})), "int8");
  EXPECT_EQ(selection.codecOf(1, matrix()), "2bit");
  EXPECT_EQ(selection.codecOf(2, matrix()), "1bit");
  EXPECT_EQ(selection.codecOf(7, matrix()), "1bit") << "of a parameter without a name";
}

TEST(Selection, RefusesWhatLeavesAParameterWithoutACodec) {
  EXPECT_THROW(Selection("", "1d"), c10::ValueError);
  EXPECT_THROW(Selection("conv*=4bit", "1d"), c10::ValueError);
  EXPECT_THROW(Selection("3bit", "1d"), c10::ValueError);
}

TEST(Selection, RefusesACodecThatNoParameterCouldEverTake) {
  EXPECT_THROW(Selection("4bit, 2bit", ""), c10::ValueError);
  EXPECT_THROW(Selection("*=4bit, conv*=2bit, *=1bit", ""), c10::ValueError);
}

const std::vector<std::string> kNames{"wte.weight", "block1.norm.weight", "fc.weight"};

std::string complaintOf(const std::string& codec, const std::string& exact,
                        const std::optional<std::vector<std::string>>& names = kNames) {
  try {
    Selection(codec, exact).checkNames(names);
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "none";
}

TEST(Selection, TakesAWordThatNoParameterFits) { EXPECT_EQ(complaintOf("4bit", "1d, embedding, head, small"), "none"); }

TEST(Selection, RefusesAMisspeltWordAndSaysWhichIsMeant) {
  EXPECT_THAT(complaintOf("4bit", "1d, embeding"), HasSubstr("'embeding', which is none of its words"));
  EXPECT_THAT(complaintOf("4bit", "1d, embeding"), HasSubstr("(did you mean 'embedding'?)"));
  EXPECT_THAT(complaintOf("4bit", "haed"), HasSubstr("(did you mean 'head'?)"));
  EXPECT_THAT(complaintOf("4bit", "1D"), HasSubstr("(did you mean '1d'?)"));
  EXPECT_THAT(complaintOf("4bit", "smal"), HasSubstr("(did you mean 'small'?)"));
  EXPECT_THAT(complaintOf("4bit", "fc.weigth"), HasSubstr("(did you mean 'fc.weight'?)"));
}

TEST(Selection, RefusesAPatternThatFitsNoParameter) {
  EXPECT_EQ(complaintOf("wte.*=2bit, 4bit", "block?.norm*"), "none");
  EXPECT_THAT(complaintOf("4bit", "blocks.*"), HasSubstr("'blocks.*', which is none"));
  EXPECT_THAT(complaintOf("blocks.*=2bit, 4bit", ""), HasSubstr("option 'codec'"));
  EXPECT_THAT(complaintOf("blocks.*=2bit, 4bit", ""), HasSubstr("fits no parameter's name"));
}

TEST(Selection, RefusesWhatNeedsAModelWhereThereIsNone) {
  EXPECT_EQ(complaintOf("4bit", kExactByDefault, std::nullopt), "none");
  EXPECT_EQ(complaintOf("*=4bit", "small,1d", std::nullopt), "none");
  EXPECT_THAT(complaintOf("4bit", "1d, head", std::nullopt), HasSubstr("holds 'head', which only a model can tell"));
  EXPECT_THAT(complaintOf("4bit", "embeding", std::nullopt), HasSubstr("holds 'embeding', a pattern"));
  EXPECT_THAT(complaintOf("fc.*=2bit, 4bit", "", std::nullopt), HasSubstr("option 'codec'"));
}

}  // namespace
}  // namespace bagua::quantized
