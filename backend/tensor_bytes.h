// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

namespace bagua {

// The memory of a dense tensor, in memory order, as a flat tensor. Shares the storage.
at::Tensor flatOf(const at::Tensor& tensor);
// The same, as bytes: transports that only move data need know no dtype.
at::Tensor bytesOf(const at::Tensor& tensor);

}  // namespace bagua
