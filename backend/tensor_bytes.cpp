// SPDX-License-Identifier: Apache-2.0
#include "backend/tensor_bytes.h"

#include <ATen/ops/empty.h>

namespace bagua {
namespace {

at::Tensor alias(const at::Tensor& tensor, at::ScalarType dtype, int64_t offset, int64_t numel) {
  at::Tensor flat = at::empty({0}, tensor.options().dtype(dtype));
  flat.unsafeGetTensorImpl()->set_storage_keep_dtype(tensor.storage());
  flat.unsafeGetTensorImpl()->set_storage_offset(offset);
  flat.unsafeGetTensorImpl()->set_sizes_contiguous({numel});
  return flat;
}

}  // namespace

at::Tensor flatOf(const at::Tensor& tensor) {
  return alias(tensor, tensor.scalar_type(), tensor.storage_offset(), tensor.numel());
}

at::Tensor bytesOf(const at::Tensor& tensor) {
  const auto itemSize = static_cast<int64_t>(tensor.element_size());
  return alias(tensor, at::kByte, tensor.storage_offset() * itemSize, tensor.numel() * itemSize);
}

}  // namespace bagua
