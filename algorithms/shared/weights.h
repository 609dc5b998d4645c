// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "algorithms/bucket.h"
#include "algorithms/step_context.h"

namespace bagua {

// Weights that travel together: parameters of one dtype on one device, as one flat tensor and back.
class WeightBucket {
 public:
  // `positions`: of the parameters among all that are cut into buckets.
  WeightBucket(std::vector<at::Tensor> parameters, std::vector<int64_t> positions);

  [[nodiscard]] int64_t numel() const { return numel_; }
  [[nodiscard]] int64_t firstPosition() const { return positions_.front(); }
  // The parts of a flat tensor, which has an element for each of the parameters.
  [[nodiscard]] BucketEntries entriesOf(const at::Tensor& flat) const;
  // A new flat tensor with the values of the parameters, one after another.
  [[nodiscard]] at::Tensor pack() const;
  // The same in another dtype.
  [[nodiscard]] at::Tensor packAs(at::ScalarType dtype) const;
  // `difference` becomes `flat` less the parameters, in the dtype of both.
  void subtractFrom(const at::Tensor& flat, const at::Tensor& difference) const;
  // The parameters become mixing * parameters + (1 - mixing) * flat, computed in the dtype of `flat`.
  void mixWith(const at::Tensor& flat, double mixing) const;
  // Overwrites the parameters.
  void unpack(const at::Tensor& flat) const;
  // Adds to the parameters; rounds once, to their dtype, whatever the dtype of `flat`.
  void add(const at::Tensor& flat) const;

 private:
  template <typename Visit>
  void forEachPart(const at::Tensor& flat, Visit&& visit) const;

  const std::vector<at::Tensor> parameters_;
  const std::vector<int64_t> positions_;
  int64_t numel_ = 0;
};

// The dtype in which weights of `dtype` are computed with: float64 of float64, else float32.
inline at::ScalarType computeTypeOf(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

// The parameters in reversed order, roughly that of their gradients; a bucket is closed when it has reached
// `bucketBytes`. Reduced the same way on every rank.
std::vector<WeightBucket> weightBuckets(const std::vector<at::Tensor>& parameters, int64_t bucketBytes);
// One bucket per dtype and device.
std::vector<WeightBucket> weightBuckets(const std::vector<at::Tensor>& parameters);

std::vector<at::Tensor> packAll(const std::vector<WeightBucket>& buckets);
void unpackAll(const std::vector<WeightBucket>& buckets, const std::vector<at::Tensor>& flats);

// Blocks until all ranks hold the mean of their weights, or those of rank 0. Collective.
void averageWeights(StepContext& context);
void broadcastWeights(StepContext& context);
// The same for other tensors, as many and of the same shapes on all ranks; those to be averaged may be sparse.
void averageTensors(StepContext& context, const std::vector<at::Tensor>& tensors);
void broadcastTensors(StepContext& context, const std::vector<at::Tensor>& tensors);

// Counts the changes made to the parameters: another number, other weights.
int64_t versionOf(const std::vector<at::Tensor>& parameters);

}  // namespace bagua
