// SPDX-License-Identifier: Apache-2.0
#include "kernels/loops/small_numbers/small_numbers.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

namespace bagua {
namespace {

TEST(SmallNumbers, AreWithinHalfAUnitOfTheirGroup) {
  for (const int64_t length : {0, 1, 127, 128, 129, 70'001}) {
    for (const double scale : {1e-30, 1.0, 1e30}) {
      const at::Tensor values = at::randn({length}) * scale;
      const SmallNumbers small = SmallNumbers::encoded(values);
      EXPECT_EQ(small.bytes(), length + (length + 127) / 128);
      const at::Tensor decoded = small.decoded();
      for (int64_t begin = 0; begin < length; begin += 128) {
        const int64_t end = std::min(begin + 128, length);
        const at::Tensor group = values.slice(0, begin, end);
        // The scale is at most twice what the largest number needs.
        EXPECT_LE((decoded.slice(0, begin, end) - group).abs().max().item<double>(),
                  group.abs().max().item<double>() / 127 * 1.001);
      }
    }
  }
}

TEST(SmallNumbers, OfWhatWasDecodedAreTheSameBytes) {
  for (int seed = 0; seed < 20; ++seed) {
    const SmallNumbers once = SmallNumbers::encoded(at::randn({5000}) * (seed - 3));
    const SmallNumbers twice = SmallNumbers::encoded(once.decoded());
    EXPECT_TRUE(at::equal(once.codes, twice.codes));
    EXPECT_TRUE(at::equal(once.exponents, twice.exponents));
  }
}

TEST(SmallNumbers, OfTheLargestAreFiniteAndOfTheLeastZeros) {
  const float largest = std::numeric_limits<float>::max();
  const at::Tensor values = at::cat({at::full({128}, largest), at::full({128}, -largest), at::full({3}, 1e-42)});
  const at::Tensor decoded = SmallNumbers::encoded(values).decoded();
  EXPECT_TRUE(decoded.isfinite().all().item<bool>());
  EXPECT_GT(decoded[0].item<float>(), 1.6e38F);
  EXPECT_TRUE(decoded.narrow(0, 256, 3).eq(0).all().item<bool>());
}

TEST(SmallNumbers, AreBlendedAsTheirValuesAre) {
  const at::Tensor one = at::randn({1000});
  const at::Tensor other = at::randn({1000});
  const SmallNumbers old = SmallNumbers::encoded(one);
  const at::Tensor blend = SmallNumbers::blended(old, 0.8F, other, 0.2F).decoded();
  const at::Tensor expected = SmallNumbers::encoded(old.decoded() * 0.8F + other * 0.2F).decoded();
  // A sum that is rounded otherwise may take the next code.
  EXPECT_LE((blend - expected).abs().max().item<float>(), expected.abs().max().item<float>() / 64);
  EXPECT_GT(blend.eq(expected).sum().item<int64_t>(), 990);
}

}  // namespace
}  // namespace bagua
