// SPDX-License-Identifier: Apache-2.0
#include "backend/operation/memory_use.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

namespace bagua {
namespace {

MemoryUse reading(const at::Tensor& tensor) { return {{tensor}, {}}; }
MemoryUse writing(const at::Tensor& tensor) { return {{}, {tensor}}; }

TEST(MemoryUse, OneElementInCommonIsAConflictAndNoneIsNot) {
  const at::Tensor whole = at::zeros({4, 6});
  const at::Tensor first = whole.narrow(0, 0, 2);
  EXPECT_TRUE(writing(first).conflictsWith(writing(whole.view(-1).narrow(0, 11, 1))));
  EXPECT_FALSE(writing(first).conflictsWith(writing(whole.narrow(0, 2, 2))));
  EXPECT_FALSE(writing(first).conflictsWith(writing(whole.narrow(0, 2, 0))));
  // A column reaches to the last row.
  EXPECT_TRUE(writing(whole.select(1, 0)).conflictsWith(writing(whole.view(-1).narrow(0, 18, 1))));
}

TEST(MemoryUse, WhatIsOnlyReadMayBeReadByOthers) {
  const at::Tensor tensor = at::zeros({4});
  EXPECT_FALSE(reading(tensor).conflictsWith(reading(tensor)));
  EXPECT_TRUE(reading(tensor).conflictsWith(writing(tensor)));
  EXPECT_TRUE(writing(tensor).conflictsWith(reading(tensor)));
}

// Whoever asks has to take it for any.
TEST(MemoryUse, OfATensorThatIsNotDenseIsNotKnown) {
  const at::Tensor sparse = at::empty({4}, at::TensorOptions().dtype(at::kFloat).layout(at::kSparse));
  EXPECT_FALSE(writing(sparse).isKnown());
  EXPECT_FALSE(reading(sparse).isKnown());
  EXPECT_TRUE(writing(at::zeros({4})).isKnown());
}

}  // namespace
}  // namespace bagua
