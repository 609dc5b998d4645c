// SPDX-License-Identifier: Apache-2.0
#include "algorithms/powersgd/mean_look.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <utility>

namespace bagua::powersgd {
namespace {

// Elements of each matrix whose true mean travels, and those whose norms are looked at, at most.
constexpr int64_t kExact = 256;
constexpr int64_t kSample = 1 << 10;
// How far products may be from the true mean, in its squared norms: little more than zeros would be. Error feedback
// sends in one step what several have left out, so that single products of a sound training may be further away.
constexpr double kSoundError = 1.25;
// A sampled matrix.
struct Sampled {
  int64_t parameter = -1;
  int64_t length = 0;
};

// One element of so many, all over the matrix. Odd, lest they all lie in a few columns.
int64_t strideOf(int64_t elements, int64_t most) { return ((elements + most - 1) / most) | 1; }

int64_t sampleLength(int64_t elements, int64_t most) {
  const int64_t stride = strideOf(elements, most);
  return (elements + stride - 1) / stride;
}

at::Tensor sampleOf(const at::Tensor& matrix, int64_t most) {
  return matrix.flatten().slice(0, 0, std::nullopt, strideOf(matrix.numel(), most)).to(at::kFloat);
}

// `numbers`: those of a look, and behind them of each matrix what its sample has become.
std::vector<Guard::Reading> readingsOf(const std::vector<Sampled>& all, const std::string& codec,
                                       const float* numbers) {
  constexpr double kNoLimit = std::numeric_limits<double>::infinity();
  const float* exact = numbers + 2 * all.size();
  const float* product = exact;
  for (const auto& [parameter, length] : all) product += length;
  std::vector<double> parts;
  double error = 0;
  double norm = 0;
  for (const auto& [parameter, length] : all) {
    const double own = squaredDistance(product, exact, length);
    const double ownNorm = squaredNorm(exact, length);
    parts.push_back(own / ownNorm);
    error += own;
    norm += ownNorm;
    product += length;
    exact += length;
  }
  std::vector<Guard::Reading> readings;
  // GradScaler skips such a step, or all gradients were zeros.
  if (!std::isfinite(error / norm)) return readings;
  for (size_t i = 0; i < all.size(); ++i) {
    // A matrix that is far away by itself is nothing to worry about while all together are not.
    const double far = std::min(parts[i], error / norm);
    readings.push_back({all[i].parameter, Guard::Measure::kMean, far, kSoundError, codec, "float32"});
    const double held = numbers[2 * i] / numbers[2 * i + 1];
    readings.push_back({all[i].parameter, Guard::Measure::kResidual, held, kNoLimit, codec, "float32"});
  }
  return readings;
}

}  // namespace

// For each matrix the squared norms of residual and gradient, then all samples.
at::Tensor lookAt(const std::vector<at::Tensor>& gradients, const std::vector<at::Tensor>& residuals) {
  std::vector<at::Tensor> squares;
  std::vector<at::Tensor> all(1);
  for (size_t i = 0; i < gradients.size(); ++i) {
    const at::Tensor own = sampleOf(gradients[i], kSample).square().sum();
    squares.push_back(residuals.empty() ? at::zeros_like(own) : sampleOf(residuals[i], kSample).square().sum());
    squares.push_back(own);
    all.push_back(sampleOf(gradients[i], kExact));
  }
  all.front() = at::stack(squares);
  return at::cat(all);
}

int64_t elementsOfLook(const Division& division) {
  int64_t elements = 0;
  for (const auto& [shape, matrices] : division.groups) {
    elements += static_cast<int64_t>(matrices.size()) * (2 + sampleLength(shape.rows * shape.columns, kExact));
  }
  return elements;
}

void tell(Guard& guard, int64_t step, const Division& division, int64_t rank, const at::Tensor& look,
          const std::vector<at::Tensor>& products) {
  std::vector<at::Tensor> told = {look.to(at::kFloat)};
  std::vector<Sampled> all;
  for (const auto& group : division.groups) {
    for (const auto& matrix : group.matrices) {
      told.push_back(sampleOf(products[all.size()], kExact));
      all.push_back({matrix.parameter, told.back().numel()});
    }
  }
  const std::string codec = "powersgd of rank " + std::to_string(rank);
  guard.note(step, at::cat(told),
             [all = std::move(all), codec](const float* numbers) { return readingsOf(all, codec, numbers); });
}

}  // namespace bagua::powersgd
