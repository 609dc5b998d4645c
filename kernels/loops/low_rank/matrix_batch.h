// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "kernels/device_ways.h"

namespace bagua::low_rank {

// Matrices M of one shape, which two thin factors P and Q stand for: M is about P Q^T.
//
// M = gradient + residual. Gradients are (rows, columns), contiguous, of any floating dtype; residuals are float32 of
// the same shape, or there are none. All is computed in factorType(), in which the factors are.
//
// A factor of all matrices is one contiguous tensor, (matrices, rank, rows) or (matrices, rank, columns): each column
// of P or Q lies in one piece.
//
// On the CPU the bits of a matrix are the same on every processor, wherever it lies and whatever others are in the
// batch, and the calling thread does all. On CUDA the matrices are gathered for one product of them all, and nothing
// waits for the device.
class MatrixBatch {
 public:
  // Replaced residuals go to `nextResiduals`, which may be the same tensors.
  MatrixBatch(std::vector<at::Tensor> gradients, const std::vector<at::Tensor>& residuals)
      : MatrixBatch(std::move(gradients), residuals, residuals) {}
  MatrixBatch(std::vector<at::Tensor> gradients, std::vector<at::Tensor> residuals,
              std::vector<at::Tensor> nextResiduals);

  // float64 for gradients of float64, else float32.
  static at::ScalarType factorType(at::ScalarType gradients);

  // P = M Q. On the CPU M takes the gradients' place until replace(), where it has their dtype.
  void multiply(const at::Tensor& q, at::Tensor& p);
  // Q = M^T P. After multiply().
  void multiplyTransposed(const at::Tensor& p, at::Tensor& q);
  // gradient = P Q^T;  next residual = M - gradient, as it was rounded to its dtype. Where it would not be finite that
  // stays as it is, and all do unless `areUsable`, one bool. The last call.
  void replace(const at::Tensor& p, const at::Tensor& q, const at::Tensor& areUsable);

 private:
  [[nodiscard]] bool isOnHost() const { return worksOnCpu(gradients_[0]); }
  void gather(at::ScalarType type);
  void replaceOnDevice(const at::Tensor& p, const at::Tensor& q, const at::Tensor& areUsable);
  void replaceRounded(const at::Tensor& p, const at::Tensor& q, bool areUsable);

  const std::vector<at::Tensor> gradients_;
  const std::vector<at::Tensor> residuals_;
  const std::vector<at::Tensor> nextResiduals_;
  // Where the CPU keeps M: the gradients themselves, or sums_ of 16-bit gradients.
  std::vector<at::Tensor> matrices_;
  // All M, one after another.
  at::Tensor sums_;
};

}  // namespace bagua::low_rank
