// SPDX-License-Identifier: Apache-2.0
#include "kernels/loops/low_rank/orthogonalize.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "kernels/device_ways.h"

namespace bagua::low_rank {
namespace {

// What a projection leaves of a unit vector that the others make up: rounding errors of float64, with room for the
// number of its elements.
constexpr double kNothing = 1e-13;

// Sums that the compiler may put into a register; the order of additions does not depend on whether it does.
double dot(const double* one, const double* other, int64_t count) {
  constexpr int64_t kWidth = 8;
  std::array<double, kWidth> sums{};
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    for (int64_t j = 0; j < kWidth; ++j) sums[j] += one[i + j] * other[i + j];
  }
  double rest = 0;
  for (; i < count; ++i) rest += one[i] * other[i];
  return (((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]))) + rest;
}

void divide(double* vector, double divisor, int64_t count) {
  for (int64_t i = 0; i < count; ++i) vector[i] /= divisor;
}

// The largest magnitude; NaN where there is one.
double magnitude(const double* vector, int64_t count) {
  double largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double value = std::abs(vector[i]);
    if (!(value <= largest)) largest = value;
    if (std::isnan(largest)) break;
  }
  return largest;
}

void project(double* vector, const double* others, int64_t before, int64_t count) {
  for (int64_t j = 0; j < before; ++j) {
    const double* const other = others + j * count;
    const double along = dot(vector, other, count);
    for (int64_t i = 0; i < count; ++i) vector[i] -= along * other[i];
  }
}

void makeOrthogonal(double* vector, const double* others, int64_t before, int64_t count) {
  // Squares of numbers near 1 neither overflow nor vanish.
  const double largest = magnitude(vector, count);
  if (largest == 0) return;
  divide(vector, largest, count);
  divide(vector, std::sqrt(dot(vector, vector, count)), count);
  for (int pass = 0; pass < 2 && before > 0; ++pass) {
    project(vector, others, before, count);
    const double left = std::sqrt(dot(vector, vector, count));
    if (left <= kNothing) {
      std::fill_n(vector, count, 0.0);
      return;
    }
    divide(vector, left, count);
  }
}

template <class T>
void orthogonalizeSets(at::Tensor& vectors) {
  auto* set = vectors.mutable_data_ptr<T>();
  const int64_t count = vectors.size(1);
  const int64_t elements = vectors.size(2);
  std::vector<double> wide;
  for (int64_t i = 0; i < vectors.size(0); ++i, set += count * elements) {
    wide.assign(set, set + count * elements);
    for (int64_t j = 0; j < count; ++j) makeOrthogonal(&wide[j * elements], wide.data(), j, elements);
    std::copy(wide.begin(), wide.end(), set);
  }
}

at::Tensor normOf(const at::Tensor& vector) { return vector.square().sum(-1, true).sqrt_(); }

// The same for vector i of all sets at once; choices are made by where(), for which nobody waits.
void orthogonalizeOnDevice(at::Tensor& vectors) {
  const at::Tensor wide = vectors.to(at::kDouble);
  for (int64_t i = 0; i < vectors.size(1); ++i) {
    at::Tensor vector = wide.select(1, i).clone();
    const at::Tensor largest = vector.abs().amax(-1, true);
    vector.div_(largest).div_(normOf(vector));
    at::Tensor isNothing = largest == 0;
    for (int pass = 0; pass < 2 && i > 0; ++pass) {
      const at::Tensor others = wide.narrow(1, 0, i);
      const at::Tensor along = (others * vector.unsqueeze(1)).sum(-1, true);
      vector.sub_((along * others).sum(1));
      const at::Tensor left = normOf(vector);
      isNothing.logical_or_(left <= kNothing);
      vector.div_(left);
    }
    wide.select(1, i).copy_(at::where(isNothing, at::zeros_like(vector), vector));
  }
  vectors.copy_(wide);
}

}  // namespace

void orthogonalize(at::Tensor& vectors) {
  TORCH_INTERNAL_ASSERT(vectors.dim() == 3 && vectors.is_contiguous() && vectors.size(1) <= vectors.size(2));
  if (worksOnCpu(vectors)) {
    if (vectors.scalar_type() == at::kDouble) return orthogonalizeSets<double>(vectors);
    orthogonalizeSets<float>(vectors);
  } else {
    orthogonalizeOnDevice(vectors);
  }
}

}  // namespace bagua::low_rank
