// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <compare>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "algorithms/bucket.h"
#include "kernels/codec.h"

namespace bagua::powersgd {

// A matrix and the rank of the product that stands for it.
struct Shape {
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t rank = 0;

  auto operator<=>(const Shape&) const = default;
};

// When a gradient is worth a product.
struct Worth {
  int64_t rank = 0;
  // Elements of the matrix for each of the factors'.
  double minCompression = 0;
};

// The matrix that a gradient is: the first dimension against all others, as torch's hook has it, or the outermost in
// memory of one that is stored otherwise (channels_last, transposed), so that it need not be copied. Nothing for
// vectors and for what the factors would hardly be smaller than: those travel as they are.
std::optional<Shape> matrixOf(const at::Tensor& gradient, const Worth& worth);

// A gradient of a bucket that is a matrix.
struct Matrix {
  int64_t parameter = -1;
  // In the bucket's flat tensor.
  Piece elements;
};

// All matrices of a bucket of one shape, in the bucket's order.
struct MatrixGroup {
  Shape shape;
  std::vector<Matrix> matrices;
};

// What of a bucket travels in which way.
struct Division {
  // By shape.
  std::vector<MatrixGroup> groups;
  // The matrices' elements, ascending, and those between them, which travel as they are; neighbours in one.
  std::vector<Piece> matrices;
  std::vector<Piece> exact;
};

int64_t elementsIn(const std::vector<Piece>& pieces);
// Of an element of the bucket, which is in one of `pieces`: among those of all of them.
int64_t placeIn(const std::vector<Piece>& pieces, int64_t element);
// Of all P and of all Q.
std::pair<int64_t, int64_t> factorElements(const Division& division);

// The gradients of a group, as views of the bucket.
std::vector<at::Tensor> matricesOf(const Bucket& bucket, const MatrixGroup& group);

// The gradients that travel as they are, into the message or from there.
void copyExact(const Bucket& bucket, const Division& division, const at::Tensor& message, bool isOutgoing);

// Parameters of which `isExact` says so travel as they are, whatever they are worth.
Division divide(
    const Bucket& bucket, const Worth& worth,
    const std::function<bool(int64_t parameter)>& isExact = [](int64_t) { return false; });

}  // namespace bagua::powersgd
