// SPDX-License-Identifier: Apache-2.0
#include "backend/operation/sparse_reduction.h"

#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "tests/fuzz/lone_rank.h"
#include "tests/support/thread_ranks.h"

namespace bagua {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kRows = 10;
constexpr int64_t kWidth = 3;

at::Tensor indicesOf(const std::vector<int64_t>& rows) { return at::tensor(rows, at::kLong).unsqueeze(0); }

// Entries in `rows` of a table, in any order and number.
at::Tensor entries(const std::vector<int64_t>& rows, double value) {
  const at::Tensor values = at::ones({static_cast<int64_t>(rows.size()), kWidth}) * value;
  return at::sparse_coo_tensor(indicesOf(rows), values, {kRows, kWidth});
}

// As a user may make it who promises what is not so.
at::Tensor promisedToBeCoalesced(const at::Tensor& indices, at::IntArrayRef sizes) {
  return at::_sparse_coo_tensor_unsafe(indices, at::ones({indices.size(1)}), sizes, at::TensorOptions(),
                                       /*is_coalesced=*/true);
}

// What each rank is told: its error, or nothing.
std::vector<std::string> errorsOf(const std::vector<at::Tensor>& tensors, const std::vector<std::string>& hosts = {}) {
  std::vector<std::string> errors(tensors.size());
  testing::runRanks(
      static_cast<int>(tensors.size()),
      [&](Communicator& communicator) {
        at::Tensor tensor = tensors[communicator.rank()];
        try {
          allReduceSparse(communicator, tensor, /*average=*/false);
        } catch (const c10::ValueError& error) {
          errors[communicator.rank()] = error.what_without_backtrace();
        }
      },
      hosts);
  return errors;
}

TEST(SparseReduction, AddsTheEntriesOfAllRanks) {
  // Of different number, out of order, several for one row; more than the table has rows; none.
  const std::vector<std::vector<int64_t>> rows{{7, 2, 2}, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9}, {}};
  at::Tensor expected = at::zeros({kRows, kWidth});
  for (size_t rank = 0; rank < rows.size(); ++rank) {
    for (const int64_t row : rows[rank]) expected[row] += static_cast<double>(rank + 1);
  }
  for (const bool average : {false, true}) {
    std::vector<at::Tensor> results(rows.size());
    testing::runRanks(static_cast<int>(rows.size()), [&](Communicator& communicator) {
      at::Tensor tensor = entries(rows[communicator.rank()], communicator.rank() + 1);
      allReduceSparse(communicator, tensor, average);
      results[communicator.rank()] = tensor.to_dense();
    });
    for (const auto& result : results) {
      EXPECT_TRUE(at::allclose(result, average ? expected / 3 : expected)) << result;
      EXPECT_TRUE(at::equal(result, results[0])) << "other bits than on rank 0";
    }
  }
}

TEST(SparseReduction, MeansOfIntegersTruncateTowardsZero) {
  testing::runRanks(2, [](Communicator& communicator) {
    at::Tensor tensor = at::sparse_coo_tensor(indicesOf({1}), at::tensor({-1 - communicator.rank()}), {kRows});
    allReduceSparse(communicator, tensor, /*average=*/true);
    EXPECT_EQ(tensor.to_dense()[1].item<int64_t>(), -1) << "of -1 and -2";
  });
}

TEST(SparseReduction, AddsNumbersOf16BitsIn32) {
  testing::runRanks(2, [&](Communicator& communicator) {
    at::Tensor tensor = entries({1}, 40000).to(at::kHalf);
    allReduceSparse(communicator, tensor, /*average=*/true);
    EXPECT_EQ(tensor.scalar_type(), at::kHalf);
    EXPECT_TRUE(at::equal(tensor.to_dense(), entries({1}, 40000).to(at::kHalf).to_dense()));
  });
  testing::runRanks(3, [&](Communicator& communicator) {
    at::Tensor tensor = entries({1}, communicator.rank() == 0 ? 256 : 1).to(at::kBFloat16);
    allReduceSparse(communicator, tensor, /*average=*/false);
    EXPECT_TRUE(at::equal(tensor.to_dense().to(at::kFloat), entries({1}, 258).to_dense()));
  });
}

TEST(SparseReduction, RefusesOtherShapesOnAllRanks) {
  const at::Tensor narrow = at::sparse_coo_tensor(indicesOf({1}), at::ones({1}), {kRows});
  for (const auto& error : errorsOf({entries({1}, 1), narrow})) {
    EXPECT_THAT(error, HasSubstr("sparse tensors of rank 0 and rank 1 cannot be added"));
  }
}

TEST(SparseReduction, RefusesAnIndexOutsideOfTheShapeOnAllRanks) {
  const std::vector<std::vector<int64_t>> outside{{kRows, 0}, {-1, 0}, {0, kWidth}, {0, -1}};
  for (const auto& position : outside) {
    const at::Tensor wrong = at::tensor({int64_t{1}, position[0], int64_t{1}, position[1]}, at::kLong).view({2, 2});
    const at::Tensor right = at::zeros({2, 2}, at::kLong);
    const std::vector<at::Tensor> tensors{promisedToBeCoalesced(right, {kRows, kWidth}),
                                          promisedToBeCoalesced(wrong, {kRows, kWidth})};
    for (const auto& hosts : {std::vector<std::string>{"a", "a"}, std::vector<std::string>{"a", "b"}}) {
      for (const auto& error : errorsOf(tensors, hosts)) {
        EXPECT_THAT(error, HasSubstr("rank 1 has an index outside of the shape [10, 3]")) << position;
      }
    }
  }
}

TEST(SparseReduction, RefusesMoreEntriesThanTheShapeHasRoomForOnAllRanks) {
  const std::vector<at::Tensor> tensors{promisedToBeCoalesced(at::arange(kRows).unsqueeze(0), {kRows}),
                                        promisedToBeCoalesced(at::zeros({1, kRows + 1}, at::kLong), {kRows})};
  for (const auto& error : errorsOf(tensors)) {
    EXPECT_THAT(error, AllOf(HasSubstr("rank 1 has 11 coalesced entries"), HasSubstr("from 0 to 10 of them")));
  }
}

// A peer that says it has `count` entries.
std::string errorAtCount(int64_t count, const at::Tensor& own) {
  constexpr int kFacts = 4;
  bool isFirst = true;
  fuzz::LoneRank rank(2, {}, [&](void* bytes, size_t) {
    if (std::exchange(isFirst, false)) static_cast<int64_t*>(bytes)[kFacts] = count;
  });
  at::Tensor tensor = own;
  try {
    allReduceSparse(rank.communicator(), tensor, /*average=*/false);
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "";
}

TEST(SparseReduction, RefusesANumberOfEntriesThatIsNone) {
  for (const int64_t count :
       {int64_t{-1}, kRows + 1, std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()}) {
    EXPECT_THAT(errorAtCount(count, entries({1}, 1)), HasSubstr("rank 1 has " + std::to_string(count)));
  }
  EXPECT_EQ(errorAtCount(kRows, entries({1}, 1)), "");
}

}  // namespace
}  // namespace bagua
