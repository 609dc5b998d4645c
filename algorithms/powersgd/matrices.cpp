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

Division divide(const Bucket& bucket, const Worth& worth) {
  Division division;
  std::map<Shape, std::vector<Matrix>> byShape;
  int64_t begin = 0;
  for (const auto& [parameter, gradient, isUsed] : bucket.entries) {
    const Piece piece{begin, begin + gradient.numel()};
    begin = piece.end;
    const auto shape = matrixOf(gradient, worth);
    append(shape ? division.matrices : division.exact, piece);
    if (shape) byShape[*shape].push_back({parameter, piece});
  }
  for (auto& [shape, matrices] : byShape) division.groups.push_back({shape, std::move(matrices)});
  return division;
}

}  // namespace bagua::powersgd
