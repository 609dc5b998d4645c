// SPDX-License-Identifier: Apache-2.0
#include "algorithms/powersgd/matrices.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>

namespace bagua::powersgd {
namespace {

int64_t outermostSize(const at::Tensor& gradient) {
  if (gradient.is_contiguous()) return gradient.size(0);
  int64_t size = 1;
  int64_t stride = -1;
  for (int64_t dim = 0; dim < gradient.dim(); ++dim) {
    if (gradient.size(dim) == 1 || gradient.stride(dim) <= stride) continue;
    size = gradient.size(dim);
    stride = gradient.stride(dim);
  }
  return size;
}

void append(std::vector<Piece>& pieces, const Piece& piece) {
  if (piece.begin == piece.end) return;
  if (!pieces.empty() && pieces.back().end == piece.begin) {
    pieces.back().end = piece.end;
  } else {
    pieces.push_back(piece);
  }
}

}  // namespace

std::optional<Shape> matrixOf(const at::Tensor& gradient, const Worth& worth) {
  if (gradient.dim() < 2 || gradient.numel() == 0) return std::nullopt;
  Shape shape{.rows = outermostSize(gradient)};
  shape.columns = gradient.numel() / shape.rows;
  shape.rank = std::min({shape.rows, shape.columns, worth.rank});
  const auto factors = static_cast<double>((shape.rows + shape.columns) * shape.rank);
  if (factors * worth.minCompression >= static_cast<double>(gradient.numel())) return std::nullopt;
  return shape;
}

int64_t elementsIn(const std::vector<Piece>& pieces) {
  int64_t elements = 0;
  for (const auto& piece : pieces) elements += piece.end - piece.begin;
  return elements;
}

int64_t placeIn(const std::vector<Piece>& pieces, int64_t element) {
  int64_t place = 0;
  for (const auto& piece : pieces) {
    if (element < piece.end) return place + element - piece.begin;
    place += piece.end - piece.begin;
  }
  TORCH_INTERNAL_ASSERT(false, "no piece has element ", element);
}

std::pair<int64_t, int64_t> factorElements(const Division& division) {
  int64_t p = 0;
  int64_t q = 0;
  for (const auto& [shape, matrices] : division.groups) {
    p += static_cast<int64_t>(matrices.size()) * shape.rank * shape.rows;
    q += static_cast<int64_t>(matrices.size()) * shape.rank * shape.columns;
  }
  return {p, q};
}

std::vector<at::Tensor> matricesOf(const Bucket& bucket, const MatrixGroup& group) {
  std::vector<at::Tensor> gradients;
  for (const auto& matrix : group.matrices) {
    const int64_t length = matrix.elements.end - matrix.elements.begin;
    gradients.push_back(
        bucket.flat.narrow(0, matrix.elements.begin, length).view({group.shape.rows, group.shape.columns}));
  }
  return gradients;
}

void copyExact(const Bucket& bucket, const Division& division, const at::Tensor& message, bool isOutgoing) {
  int64_t begin = 0;
  for (const auto& piece : division.exact) {
    const int64_t length = piece.end - piece.begin;
    const at::Tensor gradients = bucket.flat.narrow(0, piece.begin, length);
    const at::Tensor place = message.narrow(0, begin, length);
    if (isOutgoing) {
      place.copy_(gradients);
    } else {
      gradients.copy_(place);
    }
    begin += length;
  }
}

Division divide(const Bucket& bucket, const Worth& worth, const std::function<bool(int64_t parameter)>& isExact) {
  Division division;
  std::map<Shape, std::vector<Matrix>> byShape;
  int64_t begin = 0;
  for (const auto& [parameter, gradient, isUsed] : bucket.entries) {
    const Piece piece{begin, begin + gradient.numel()};
    begin = piece.end;
    const auto shape = isExact(parameter) ? std::nullopt : matrixOf(gradient, worth);
    append(shape ? division.matrices : division.exact, piece);
    if (shape) byShape[*shape].push_back({parameter, piece});
  }
  for (auto& [shape, matrices] : byShape) division.groups.push_back({shape, std::move(matrices)});
  return division;
}

}  // namespace bagua::powersgd
