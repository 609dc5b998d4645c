// SPDX-License-Identifier: Apache-2.0
// Which gradients the options choose. What becomes of them is in tests/multiprocess/test_quantized_allreduce.py.
#include "algorithms/shared/compressed/selection.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

namespace bagua::compressed {
namespace {

using ::testing::HasSubstr;

at::Tensor matrix() { return at::zeros({64, 64}); }

TEST(Selection, KeepsExactWhatTheWordsName) {
  Selection selection("4bit", "1d, embedding,small , block?.norm*");
  selection.useParameters({{"wte.weight", "embedding"}, {"block1.norm.weight", ""}, {"fc.weight", "head"}});
  EXPECT_EQ(selection.codecOf(0, matrix()), "");
  EXPECT_EQ(selection.codecOf(1, matrix()), "");
  EXPECT_EQ(selection.codecOf(2, matrix()), "int8");
  EXPECT_EQ(selection.codecOf(2, at::zeros({5000})), "");
  EXPECT_EQ(selection.codecOf(2, at::zeros({31, 33})), "");
  EXPECT_EQ(selection.codecOf(2, at::zeros({32, 32})), "int8");
}

TEST(Selection, TakesTheFirstPatternThatFits) {
  Selection selection("*.bias=int8, conv*=2bit, *=1bit", "");
  selection.useParameters({{"conv1.bias", ""}, {"conv1.weight", ""}, {"fc.weight", ""}});
  EXPECT_EQ(selection.codecOf(0, at::zeros({3})), "int8");
  EXPECT_EQ(selection.codecOf(1, matrix()), "2bit");
  EXPECT_EQ(selection.codecOf(2, matrix()), "1bit");
  EXPECT_EQ(selection.codecOf(7, matrix()), "1bit") << "of a parameter without a name";
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

TEST(Selection, RefusesWhatLeavesAParameterWithoutACodec) {
  for (const std::string codec : {"", "conv*=4bit"}) {
    EXPECT_THAT(complaintOf(codec, "1d"), HasSubstr("needs a codec for all other parameters"));
  }
  EXPECT_THROW(Selection("3bit", "1d"), c10::ValueError);
}

TEST(Selection, RefusesACodecThatNoParameterCouldEverTake) {
  for (const std::string codec : {"4bit, 2bit", "*=4bit, conv*=2bit, *=1bit"}) {
    EXPECT_THAT(complaintOf(codec, ""), HasSubstr("'4bit', after which no other is ever used"));
  }
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
  EXPECT_EQ(complaintOf("1d=int8, *=4bit", "small,1d", std::nullopt), "none");
  EXPECT_THAT(complaintOf("4bit", "1d, head", std::nullopt), HasSubstr("holds 'head', which only a model can tell"));
  EXPECT_THAT(complaintOf("4bit", "embeding", std::nullopt), HasSubstr("holds 'embeding', a pattern"));
  EXPECT_THAT(complaintOf("fc.*=2bit, 4bit", "", std::nullopt), HasSubstr("option 'codec'"));
  EXPECT_THAT(complaintOf("head=int8, *=4bit", "", std::nullopt), HasSubstr("holds 'head', which only a model"));
}

TEST(Selection, TakesRolesAsKeysInTheirOrder) {
  Selection selection("small=int8, embedding=2bit, *=4bit", "");
  selection.useParameters({{"wte.weight", "embedding"}, {"fc.weight", "head"}});
  EXPECT_EQ(selection.codecOf(0, at::zeros({10, 10})), "int8");
  EXPECT_EQ(selection.codecOf(0, matrix()), "2bit");
  EXPECT_EQ(selection.codecOf(1, matrix()), "4bit") << "a mapping is taken as it stands";
  EXPECT_THAT(complaintOf("embeding=int8, *=4bit", ""), HasSubstr("(did you mean 'embedding'?)"));
}

TEST(Selection, GivesRolesEightBitsBesideACodecOfFewerBitsThatIsGivenAlone) {
  for (const std::string codec : {"4bit", "2bit", "1bit", "int8", "minmax_uint8"}) {
    Selection selection(codec, kExactByDefault);
    selection.useParameters({{"wte.weight", "embedding"}, {"head.weight", "head"}, {"fc.weight", ""}});
    const std::string finer = codec.ends_with("bit") ? "int8" : codec;
    EXPECT_EQ(selection.codecOf(0, matrix()), finer);
    EXPECT_EQ(selection.codecOf(1, matrix()), finer);
    EXPECT_EQ(selection.codecOf(2, at::zeros({2000})), finer);
    EXPECT_EQ(selection.codecOf(2, matrix()), codec);
    EXPECT_EQ(selection.codecOf(0, at::zeros({10, 10})), "");
  }
}

TEST(Selection, TakesAPartOfAGradientForSmallByTheWholeUnlessItSharesAScaleWithOthers) {
  Selection selection("int8", kExactByDefault);
  selection.useParameters(
      {{.name = "adapter", .role = "", .elements = 2048}, {.name = "norm", .role = "", .elements = 1000}});
  EXPECT_EQ(selection.codecOf(0, at::zeros({8, 64})), "int8");
  EXPECT_EQ(selection.codecOf(0, at::zeros({2, 64})), "int8");
  EXPECT_EQ(selection.codecOf(0, at::zeros({2, 63})), "");
  EXPECT_EQ(selection.codecOf(1, at::zeros({500})), "");
}

// Of float32's, of parameters with these roles and shapes: what a rank sends to each owner and gets back.
struct Shaped {
  ParameterFacts facts;
  std::vector<int64_t> sizes;
};

double shareOfBytes(const std::vector<Shaped>& parameters, const std::string& codec) {
  Selection selection(codec, kExactByDefault);
  std::vector<ParameterFacts> facts;
  for (const auto& parameter : parameters) facts.push_back(parameter.facts);
  selection.useParameters(facts);
  int64_t sent = 0;
  int64_t all = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor gradient = at::empty(parameters[i].sizes, at::TensorOptions(at::kMeta));
    const std::string name = selection.codecOf(static_cast<int64_t>(i), gradient);
    const int64_t length = gradient.numel();
    sent += name.empty() ? 4 * length : CodecRegistry::find(name).codec->layout().packedBytes(length);
    all += 4 * length;
  }
  return static_cast<double>(sent) / static_cast<double>(all);
}

std::vector<Shaped> transformer(int64_t vocabulary, int64_t width, int layers) {
  std::vector<Shaped> parameters = {{{"wte", "embedding"}, {vocabulary, width}}, {{"wpe", "embedding"}, {1024, width}}};
  for (int i = 0; i < layers; ++i) {
    for (const auto& sizes : std::vector<std::vector<int64_t>>{{3 * width, width},
                                                               {3 * width},
                                                               {width, width},
                                                               {width},
                                                               {4 * width, width},
                                                               {4 * width},
                                                               {width, 4 * width},
                                                               {width},
                                                               {width},
                                                               {width},
                                                               {width},
                                                               {width}}) {
      parameters.push_back({{"h", ""}, sizes});
    }
  }
  return parameters;
}

TEST(Selection, SendsAFractionOfFloat32AlsoWhereMuchIsVocabulary) {
  const auto gpt2 = transformer(50257, 768, 12);
  EXPECT_LT(shareOfBytes(gpt2, "4bit"), 0.176) << "8 bits for a third, 4 for the others: no less is possible";
  EXPECT_LT(shareOfBytes(gpt2, "embedding=4bit, 1d=int8, *=4bit"), 0.14);
  const auto half = transformer(50257, 512, 8);
  EXPECT_LT(shareOfBytes(half, "4bit"), 0.2);
  EXPECT_GT(shareOfBytes(half, "4bit"), 0.19) << "half of it is vocabulary";
}

}  // namespace
}  // namespace bagua::compressed
