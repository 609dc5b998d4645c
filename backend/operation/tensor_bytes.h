// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace bagua {

// The memory of a dense tensor, in memory order, as a flat tensor. Shares the storage.
at::Tensor flatOf(const at::Tensor& tensor);
// The same, as bytes: transports that only move data need know no dtype.
at::Tensor bytesOf(const at::Tensor& tensor);
// The bytes of the part for each of `count` ranks, `lengths` elements each; without lengths, all parts are equal.
std::vector<at::Tensor> bytesOfParts(const at::Tensor& tensor, const std::vector<int64_t>& lengths, int count);
// Bytes per element.
inline int64_t itemSize(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.element_size()); }
// Whether two of the dense tensors have bytes in common.
bool shareBytes(const std::vector<at::Tensor>& tensors);

// Runs `change` on `tensor` in plain row-major order, on a copy where it is stored otherwise (channels_last): ranks may
// store the same tensor in different orders.
template <typename Change>
void inPlainOrder(at::Tensor& tensor, Change&& change) {
  at::Tensor plain = tensor.contiguous();
  change(plain);
  if (!plain.is_same(tensor)) tensor.copy_(plain);
}

}  // namespace bagua
