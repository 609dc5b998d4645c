// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "algorithms/bucket.h"
#include "algorithms/shared/parameter_state.h"
#include "kernels/loops/small_numbers/small_numbers.h"

namespace bagua::compressed {

// What ParameterState is, with 8 bits for a number: values are copied out and in. A checkpoint has them as float32.
class SmallResiduals {
 public:
  explicit SmallResiduals(const std::string& name) : moved_(name) {}

  // Before all else of a bucket: lets its parameters have state for the elements in `pieces` of the flat tensor. What
  // they held of other elements is appended to `orphans`, and gone.
  void arrange(const Bucket& bucket, const std::vector<Piece>& pieces, std::vector<ParameterState::Orphan>& orphans);
  // A copy of the state of elements that have been arranged.
  [[nodiscard]] at::Tensor read(const Bucket& bucket, const std::vector<Piece>& pieces) const;
  // What holds it: writing there changes the state.
  [[nodiscard]] SmallNumbers numbersOf(const Bucket& bucket, const std::vector<Piece>& pieces) const;
  // Replaces all that the bucket's parameters held.
  void write(const Bucket& bucket, const std::vector<Piece>& pieces, const at::Tensor& values);
  // The same by keep * (what `other` holds of these pieces, which have been arranged) + gain * left.
  void writeBlend(const Bucket& bucket, const std::vector<Piece>& pieces, const SmallResiduals& other, float keep,
                  const at::Tensor& left, float gain);

  // As ParameterState::forget().
  void forget(const std::vector<int64_t>& positions, Bucket::Retained& retained);

  // Multiplies all: by a power of two without rounding.
  void rescale(double factor);

  [[nodiscard]] int64_t bytes() const;
  [[nodiscard]] AlgorithmState state() const;
  void load(const AlgorithmState& state, const std::vector<at::Tensor>& parameters);

 private:
  struct Kept {
    std::vector<int64_t> positions;
    // Elements of each parameter.
    std::vector<int64_t> lengths;
    std::vector<Piece> pieces;
    SmallNumbers numbers;

    [[nodiscard]] bool isOf(const std::vector<int64_t>& otherPositions, const std::vector<Piece>& otherPieces) const;
    void copyTo(ParameterState& state) const;
  };

  void replace(const Bucket& bucket, const std::vector<Piece>& pieces, SmallNumbers numbers);

  mutable std::mutex mutex_;
  std::vector<Kept> kept_;
  // Of parameters whose elements are not kept as they were last asked for: from a checkpoint, or of other buckets.
  ParameterState moved_;
};

}  // namespace bagua::compressed
