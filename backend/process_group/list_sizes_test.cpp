// SPDX-License-Identifier: Apache-2.0
#include "backend/process_group/list_sizes.h"

#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <numeric>
#include <utility>
#include <vector>

#include "backend/operation/program_fingerprint.h"

namespace bagua {
namespace {

using Compare = void (*)(Operation& operation, const std::vector<at::Tensor>& tensors);

uint64_t comparedBy(Compare compare, const std::vector<int64_t>& sizes) {
  std::vector<at::Tensor> tensors;
  for (const int64_t size : sizes) tensors.push_back(at::zeros({size}));
  Operation operation{.name = "bagua:test", .dtype = at::kFloat, .numel = 1};
  compare(operation, tensors);
  EXPECT_LT(operation.configuration->size(), sizeof(ProgramFingerprint::configuration));
  return fingerprintOf(operation).hash();
}

// A model has so many gradients: the text that ranks show each other has room for the first sizes only.
TEST(ListSizes, OfALongListAreComparedToTheLastAndInTheirOrder) {
  std::vector<int64_t> sizes(60);
  std::iota(sizes.begin(), sizes.end(), 1);
  for (const Compare compare : {&compareSizes, &compareSizesOfAll}) {
    const uint64_t hash = comparedBy(compare, sizes);
    EXPECT_EQ(hash, comparedBy(compare, sizes));
    auto others = sizes;
    std::swap(others[58], others[59]);
    EXPECT_NE(hash, comparedBy(compare, others)) << "the sum and the number of sizes are the same";
  }
}

TEST(ListSizes, OfAListAreComparedWithTheDtypes) {
  const auto textOf = [](int64_t size, at::ScalarType dtype) {
    Operation operation{.name = "bagua:test", .dtype = at::kFloat, .numel = 1};
    compareSizesOfAll(operation, {at::zeros({4}), at::zeros({size}, dtype)});
    return *operation.configuration;
  };
  EXPECT_EQ(textOf(8, at::kDouble), "2 sizes: 4 Float, 8 Double");
  EXPECT_EQ(textOf(4, at::kDouble), "2 sizes: 4 Float, 4 Double");
  EXPECT_EQ(textOf(4, at::kFloat), "2 x 4");
  // The text of a long list names the first ones only.
  const auto hashOf = [](at::ScalarType last) {
    std::vector<at::Tensor> tensors(60, at::zeros({5}));
    tensors.front() = at::zeros({6}, at::kDouble);
    tensors.back() = at::zeros({5}, last);
    Operation operation{.name = "bagua:test", .dtype = at::kFloat, .numel = 1};
    compareSizesOfAll(operation, tensors);
    return fingerprintOf(operation).hash();
  };
  EXPECT_NE(hashOf(at::kDouble), hashOf(at::kLong));
}

}  // namespace
}  // namespace bagua
