// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "backend/operation/operation.h"

namespace bagua {

// Checks of what a user hands to one operation, made before anything is communicated, so that the group stays usable.
// Every message names the operation and the rank, what was expected and what came.
class ArgumentChecks {
 public:
  ArgumentChecks(const char* operation, GroupIdentity group) : operation_(operation), group_(std::move(group)) {}

  // Of a tensor that is only read: defined, on CPU or CUDA, strided in any way. The operation makes a copy where it
  // needs another order.
  void input(const at::Tensor& tensor, const char* role = "input") const;
  // Of one that is written to: also dense in its own memory format.
  void tensor(const at::Tensor& tensor, const char* role = "tensor") const;
  // Exactly one, as c10d passes it.
  const at::Tensor& singleInput(const std::vector<at::Tensor>& tensors) const;
  const at::Tensor& single(const std::vector<at::Tensor>& tensors, const char* role = "tensor") const;
  // All pass input(), or tensor(), and agree in dtype and device with `like`.
  void inputsAlike(const std::vector<at::Tensor>& tensors, const at::Tensor& like) const;
  void alike(const std::vector<at::Tensor>& tensors, const at::Tensor& like, const char* role) const;
  // Stored in plain row-major order.
  void rowMajor(const at::Tensor& tensor, const char* role) const;
  void sameShape(const at::Tensor& tensor, const at::Tensor& like, const char* role) const;
  void numel(const at::Tensor& tensor, int64_t expected, const char* role) const;
  // `splits` are parts of dimension 0, one per rank; empty: even parts.
  void splitSizes(const std::vector<int64_t>& splits, const at::Tensor& tensor, const char* role) const;
  void count(size_t actual, size_t expected, const char* what) const;
  void rank(int64_t rank, const char* role) const;

  // The tensors of a list that may be of several dtypes are on one device.
  void sameDevice(const at::Tensor& tensor, const at::Tensor& first, const char* role) const;
  // "bagua:all_reduce on rank 1 of 4"
  [[nodiscard]] std::string where() const;

 private:
  void sameKind(const at::Tensor& tensor, const at::Tensor& like, const char* role) const;

  const char* operation_;
  GroupIdentity group_;
};

}  // namespace bagua
