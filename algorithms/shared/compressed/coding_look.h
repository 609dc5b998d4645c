// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "algorithms/bucket.h"
#include "algorithms/shared/compressed/coding.h"
#include "algorithms/shared/compressed/mean.h"
#include "algorithms/shared/guard/guard.h"

namespace bagua::compressed {

// A look of the guard at values that are about to travel: a sample of them, at a place that is drawn by a key, is coded
// here once more, and a few travel in float32 beside the coded ones. None do so where each rank gets a part alone: that
// is not coded as a mean, and no rank has the others' to compare. All parts of a gradient count as that of the first.
// It sees those differences of weights that this rank sends, some of every parameter; nothing travels for it.
class CodingLook {
 public:
  // `flat` holds the gradients of `entries`. Before it travels.
  CodingLook(const at::Tensor& flat, const BucketEntries& entries, std::string codec, const Coding& coding,
             const MeanOptions& options, const Communicator& communicator, uint64_t key);
  // `differences` are those of `entries` from element `begin` on. The key of `encoding` draws the places.
  CodingLook(const at::Tensor& differences, int64_t begin, const BucketEntries& entries, std::string codec,
             const Encoding& encoding);

  // To be summed up in the messages of the others, of all ranks alike.
  [[nodiscard]] const at::Tensor& numbers() const { return numbers_; }
  // Hands over what that has become; `flat` is the mean that was coded.
  void tell(Guard& guard, int64_t step, const at::Tensor& flat, const at::Tensor& numbers) const;
  // The same of differences.
  void tell(Guard& guard, int64_t step) const;

 private:
  // A parameter that has elements in the sample, and which of it these are.
  struct Seen {
    int64_t parameter = -1;
    Piece within;
  };

  // Of what the sample holds; the parameters of `perPart` entries stand for those of all.
  [[nodiscard]] std::vector<Seen> seenIn(const BucketEntries& entries, size_t perPart) const;
  void tell(Guard& guard, int64_t step, const at::Tensor& flat, const at::Tensor& numbers, double soundResidual) const;
  // The first elements of the sample, but of one parameter, so that their mean tells of that; none if that has few.
  void chooseExact(int64_t elements);
  // The sample's losses, a row for each parameter.
  [[nodiscard]] at::Tensor lossesOf(const at::Tensor& sample, const at::Tensor& decoded,
                                    const at::Tensor& residual) const;

  const std::string codec_;
  // What coding may lose, see soundLossOf().
  const double soundLoss_;
  // Of `flat`: what is coded once more, and what of that travels in float32.
  Piece sample_;
  std::vector<Seen> seen_;
  Piece exact_;
  int64_t exactParameter_ = -1;
  at::Tensor numbers_;
};

}  // namespace bagua::compressed
