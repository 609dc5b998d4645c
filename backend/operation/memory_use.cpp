// SPDX-License-Identifier: Apache-2.0
#include "backend/operation/memory_use.h"

#include <algorithm>

namespace bagua {

MemoryUse::MemoryUse(const std::vector<at::Tensor>& read, const std::vector<at::Tensor>& written) {
  add(read, read_);
  add(written, written_);
}

void MemoryUse::add(const std::vector<at::Tensor>& tensors, std::vector<Span>& spans) {
  for (const auto& tensor : tensors) {
    if (!tensor.defined()) continue;
    if (tensor.layout() != at::kStrided) {
      isKnown_ = false;
      continue;
    }
    if (tensor.numel() == 0) continue;
    int64_t last = 0;
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
    const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
    spans.push_back({begin, begin + static_cast<uintptr_t>(last + 1) * tensor.element_size()});
  }
}

bool MemoryUse::overlap(const std::vector<Span>& first, const std::vector<Span>& second) {
  return std::ranges::any_of(first, [&](const Span& one) {
    return std::ranges::any_of(second,
                               [&](const Span& other) { return one.begin < other.end && other.begin < one.end; });
  });
}

bool MemoryUse::conflictsWith(const MemoryUse& other) const {
  return overlap(written_, other.written_) || overlap(written_, other.read_) || overlap(read_, other.written_);
}

}  // namespace bagua
