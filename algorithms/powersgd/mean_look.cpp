// SPDX-License-Identifier: Apache-2.0
#include "algorithms/powersgd/mean_look.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>

#include <algorithm>
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
// Numbers of each matrix.
constexpr int64_t kColumns = 3;

// One element of so many, all over the matrix. Odd, lest they all lie in a few columns.
int64_t strideOf(int64_t elements, int64_t most) { return ((elements + most - 1) / most) | 1; }

int64_t sampleLength(int64_t elements, int64_t most) {
  const int64_t stride = strideOf(elements, most);
  return (elements + stride - 1) / stride;
}

at::Tensor sampleOf(const at::Tensor& matrix, int64_t most) {
  return matrix.flatten().slice(0, 0, std::nullopt, strideOf(matrix.numel(), most)).to(at::kFloat);
}

at::Tensor squared(const at::Tensor& values) { return values.square().sum(); }

}  // namespace

// For each matrix the squared norms of residual and gradient, then all samples.
at::Tensor lookAt(const std::vector<at::Tensor>& gradients, const std::vector<at::Tensor>& residuals) {
  std::vector<at::Tensor> squares;
  std::vector<at::Tensor> all(1);
  for (size_t i = 0; i < gradients.size(); ++i) {
    squares.push_back(squared(sampleOf(residuals[i], kSample)));
    squares.push_back(squared(sampleOf(gradients[i], kSample)));
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
          const std::vector<at::Tensor>& gradients) {
  std::vector<at::Tensor> numbers;
  std::vector<int64_t> parameters;
  auto place = 2 * static_cast<int64_t>(gradients.size());
  for (const auto& group : division.groups) {
    for (const auto& matrix : group.matrices) {
      const auto i = static_cast<int64_t>(parameters.size());
      const at::Tensor product = sampleOf(gradients[i], kExact);
      const at::Tensor exact = look.narrow(0, place, product.numel()).to(at::kFloat);
      place += product.numel();
      numbers.push_back(squared(product - exact));
      numbers.push_back(squared(exact));
      numbers.push_back((look.select(0, 2 * i) / look.select(0, 2 * i + 1)).to(at::kFloat));
      parameters.push_back(matrix.parameter);
    }
  }
  const std::string codec = "powersgd of rank " + std::to_string(rank);
  guard.note(step, at::stack(numbers), [parameters = std::move(parameters), codec](const float* number) {
    constexpr double kNoLimit = std::numeric_limits<double>::infinity();
    double error = 0;
    double norm = 0;
    for (size_t i = 0; i < parameters.size(); ++i) {
      error += number[kColumns * i];
      norm += number[kColumns * i + 1];
    }
    std::vector<Guard::Reading> readings;
    for (const int64_t parameter : parameters) {
      // A matrix that is far away by itself is nothing to worry about while all together are not.
      const double far = std::min<double>(number[0] / number[1], error / norm);
      readings.push_back({parameter, Guard::Measure::kMean, far, kSoundError, codec, "float32"});
      readings.push_back({parameter, Guard::Measure::kResidual, number[2], kNoLimit, codec, "float32"});
      number += kColumns;
    }
    return readings;
  });
}

}  // namespace bagua::powersgd
