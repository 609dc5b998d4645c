// SPDX-License-Identifier: Apache-2.0
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/stack.h>
#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <tuple>

#include "kernels/loops/low_rank/matrix_batch.h"
#include "kernels/loops/low_rank/orthogonalize.h"

namespace bagua::low_rank {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

at::Tensor random(at::IntArrayRef sizes, uint64_t seed, at::ScalarType dtype = at::kFloat) {
  return at::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed)).to(dtype);
}

// The largest element of V V^T - 1.
double distanceFromOrthonormal(const at::Tensor& vectors) {
  const at::Tensor wide = vectors.to(at::kDouble);
  return (at::bmm(wide, wide.transpose(1, 2)) - at::eye(vectors.size(1), at::kDouble)).abs().max().item<double>();
}

TEST(Orthogonalize, VectorsBecomeOrthonormalAndSpanWhatTheySpanned) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    const at::Tensor before = random({3, 5, 37}, 1, dtype);
    at::Tensor after = before.clone();
    orthogonalize(after);
    const double tolerance = dtype == at::kFloat ? 1e-6 : 1e-14;
    EXPECT_LT(distanceFromOrthonormal(after), tolerance);
    // Each is made of itself and those before it: before = L after, with L lower triangular and its diagonal positive.
    const at::Tensor lower = at::bmm(before, after.transpose(1, 2));
    EXPECT_LT(lower.triu(1).abs().max().item<double>(), 40 * tolerance);
    EXPECT_GT(lower.diagonal(0, 1, 2).min().item<double>(), 0);
    EXPECT_LT((at::bmm(lower, after) - before).abs().max().item<double>(), 40 * tolerance);
  }
}

TEST(Orthogonalize, VectorsThatLieCloseTogetherBecomeOrthonormalToo) {
  for (const auto& [dtype, closeness, tolerance] : {std::tuple(at::kFloat, 1e-6, 1e-6), {at::kDouble, 1e-10, 1e-13}}) {
    at::Tensor vectors = random({1, 1, 501}, 2, dtype).expand({1, 6, 501}).clone();
    vectors += closeness * random({1, 6, 501}, 3, dtype);
    orthogonalize(vectors);
    EXPECT_LT(distanceFromOrthonormal(vectors), tolerance);
  }
}

TEST(Orthogonalize, VectorsThatSpanNothingNewBecomeZero) {
  at::Tensor vectors = random({2, 4, 23}, 4);
  vectors[0][0].zero_();
  vectors[0][2].copy_(vectors[0][1]).mul_(-2);
  vectors[1].zero_();
  orthogonalize(vectors);
  for (const auto& zero : {vectors[0][0], vectors[0][2], vectors[1]}) EXPECT_EQ(zero.abs().max().item<float>(), 0);
  for (const auto& unit : {vectors[0][1], vectors[0][3]}) EXPECT_NEAR(unit.norm().item<float>(), 1, 1e-6);
  EXPECT_NEAR((vectors[0][1] * vectors[0][3]).sum().item<float>(), 0, 1e-6);
}

TEST(Orthogonalize, NumbersWhoseSquaresOverflowOrVanishAreTakenAsAnyOther) {
  const at::Tensor plain = random({1, 3, 40}, 5, at::kDouble);
  at::Tensor expected = plain.clone();
  orthogonalize(expected);
  for (const double scale : {0x1p-1000, 0x1p1000}) {
    at::Tensor scaled = plain * scale;
    orthogonalize(scaled);
    EXPECT_TRUE(at::equal(scaled, expected)) << scale;
  }
}

TEST(Orthogonalize, NanAndInfinityReachTheirVectorAndThoseAfterIt) {
  for (const float value : {kNan, std::numeric_limits<float>::infinity()}) {
    at::Tensor vectors = random({1, 3, 20}, 6);
    vectors[0][1][7] = value;
    orthogonalize(vectors);
    EXPECT_NEAR(vectors[0][0].norm().item<float>(), 1, 1e-6);
    EXPECT_TRUE(vectors[0].narrow(0, 1, 2).isnan().all().item<bool>());
  }
}

TEST(Orthogonalize, ASetHasTheSameBitsAloneAndAmongOthers) {
  at::Tensor together = random({7, 3, 131}, 7);
  at::Tensor alone = together.narrow(0, 4, 1).clone();
  orthogonalize(together);
  orthogonalize(alone);
  EXPECT_TRUE(at::equal(together.narrow(0, 4, 1), alone));
}

struct Matrices {
  std::vector<at::Tensor> gradients;
  std::vector<at::Tensor> residuals;

  [[nodiscard]] at::Tensor sums() const {
    std::vector<at::Tensor> sums;
    for (size_t i = 0; i < gradients.size(); ++i) {
      sums.push_back(gradients[i].to(at::kDouble, false, true));
      if (!residuals.empty()) sums.back() += residuals[i];
    }
    return at::stack(sums);
  }
};

// Gradients at odd places of a flat tensor, as in a bucket.
Matrices matricesOf(int64_t count, int64_t rows, int64_t columns, at::ScalarType dtype, bool haveResiduals) {
  Matrices made;
  const int64_t length = rows * columns;
  const at::Tensor flat = random({1 + count * length}, 11, dtype);
  const at::Tensor residuals = random({1 + count * length}, 12);
  for (int64_t i = 0; i < count; ++i) {
    made.gradients.push_back(flat.narrow(0, 1 + i * length, length).view({rows, columns}));
    if (haveResiduals) made.residuals.push_back(residuals.narrow(0, 1 + i * length, length).view({rows, columns}));
  }
  return made;
}

double relativeDistance(const at::Tensor& got, const at::Tensor& expected) {
  return ((got.to(at::kDouble) - expected).norm() / expected.norm()).item<double>();
}

TEST(MatrixBatch, ProductsAndWhatTheyLeaveOutAreThoseOfTheDefinition) {
  const at::Tensor areUsable = at::ones({}, at::kBool);
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    for (const auto& [count, rows, columns, rank] : std::vector<std::array<int64_t, 4>>{
             {1, 37, 19, 1}, {1, 64, 64, 4}, {3, 41, 130, 4}, {2, 130, 67, 7}, {2, 9, 300, 2}, {1, 300, 3, 3}}) {
      for (const bool haveResiduals : {false, true}) {
        SCOPED_TRACE(c10::str(dtype, " ", count, " of ", rows, "x", columns, " rank ", rank, " ", haveResiduals));
        const auto type = MatrixBatch::factorType(dtype);
        EXPECT_EQ(type, dtype == at::kDouble ? at::kDouble : at::kFloat);
        const double tolerance = dtype == at::kDouble ? 1e-14 : 1e-6;
        const auto matrices = matricesOf(count, rows, columns, dtype, haveResiduals);
        const at::Tensor sums = matrices.sums();
        MatrixBatch batch(matrices.gradients, matrices.residuals);

        const at::Tensor q = random({count, rank, columns}, 13, type);
        at::Tensor p = at::empty({count, rank, rows}, type);
        batch.multiply(q, p);
        EXPECT_LT(relativeDistance(p, at::bmm(q.to(at::kDouble), sums.transpose(1, 2))), tolerance);

        p = random({count, rank, rows}, 14, type);
        at::Tensor found = at::empty({count, rank, columns}, type);
        batch.multiplyTransposed(p, found);
        EXPECT_LT(relativeDistance(found, at::bmm(p.to(at::kDouble), sums)), tolerance);

        batch.replace(p, q, areUsable);
        const at::Tensor product = at::bmm(p.to(at::kDouble).transpose(1, 2), q.to(at::kDouble));
        const double rounding = dtype == at::kBFloat16 ? 4e-3 : dtype == at::kHalf ? 5e-4 : tolerance;
        for (int64_t i = 0; i < count; ++i) {
          const at::Tensor gradient = matrices.gradients[i].to(at::kDouble);
          EXPECT_LT(relativeDistance(gradient, product[i]), rounding);
          if (!haveResiduals) continue;
          // Of the gradient as it is, so that rounding it is made up for.
          EXPECT_LT(relativeDistance(matrices.residuals[i], sums[i] - gradient), 2e-7);
        }
      }
    }
  }
}

TEST(MatrixBatch, ResidualsThatWouldNotBeFiniteStay) {
  auto matrices = matricesOf(2, 12, 30, at::kFloat, true);
  matrices.gradients[0][3][4] = kNan;
  const at::Tensor kept = matrices.residuals[0].clone();
  const at::Tensor before = matrices.residuals[1].clone();
  for (const bool areUsable : {true, false}) {
    MatrixBatch batch(matrices.gradients, matrices.residuals);
    const at::Tensor q = random({2, 2, 30}, 21);
    at::Tensor p = at::empty({2, 2, 12});
    batch.multiply(q, p);
    EXPECT_TRUE(p[0].select(1, 3).isnan().all().item<bool>());
    batch.replace(p, q, at::full({}, areUsable, at::kBool));
    EXPECT_TRUE(matrices.gradients[0][3].isnan().all().item<bool>());
    EXPECT_TRUE(matrices.residuals[0][3].equal(kept[3]));
    EXPECT_EQ(matrices.residuals[0][2].equal(kept[2]), !areUsable);
    EXPECT_EQ(matrices.residuals[1].equal(before), !areUsable);
    matrices.residuals[0].copy_(kept);
    matrices.residuals[1].copy_(before);
  }
}

}  // namespace
}  // namespace bagua::low_rank
