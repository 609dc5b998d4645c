// SPDX-License-Identifier: Apache-2.0
#include "backend/operation/tensor_bytes.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

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
  const int64_t item = itemSize(tensor);
  return alias(tensor, at::kByte, tensor.storage_offset() * item, tensor.numel() * item);
}

std::vector<at::Tensor> bytesOfParts(const at::Tensor& tensor, const std::vector<int64_t>& lengths, int count) {
  const at::Tensor bytes = bytesOf(tensor);
  std::vector<at::Tensor> parts;
  int64_t begin = 0;
  for (int rank = 0; rank < count; ++rank) {
    const int64_t length = (lengths.empty() ? tensor.numel() / count : lengths[rank]) * itemSize(tensor);
    parts.push_back(bytes.narrow(0, begin, length));
    begin += length;
  }
  return parts;
}

bool shareBytes(const std::vector<at::Tensor>& tensors) {
  std::vector<std::pair<const uint8_t*, const uint8_t*>> ranges;
  ranges.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    const auto* const begin = static_cast<const uint8_t*>(tensor.const_data_ptr());
    ranges.emplace_back(begin, begin + tensor.nbytes());
  }
  std::ranges::sort(ranges);
  const auto overlap = [](const auto& lower, const auto& upper) { return upper.first < lower.second; };
  return std::ranges::adjacent_find(ranges, overlap) != ranges.end();
}

}  // namespace bagua
