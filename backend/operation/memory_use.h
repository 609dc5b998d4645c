// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace bagua {

// The memory that an operation reads and writes: two of which one writes what the other uses must not run together.
class MemoryUse {
 public:
  MemoryUse() = default;
  MemoryUse(const std::vector<at::Tensor>& read, const std::vector<at::Tensor>& written);

  // False where a tensor does not say where it lies, as a sparse one.
  [[nodiscard]] bool isKnown() const { return isKnown_; }
  [[nodiscard]] bool conflictsWith(const MemoryUse& other) const;

 private:
  // Addresses.
  struct Span {
    uintptr_t begin;
    uintptr_t end;
  };
  void add(const std::vector<at::Tensor>& tensors, std::vector<Span>& spans);
  static bool overlap(const std::vector<Span>& first, const std::vector<Span>& second);

  std::vector<Span> read_;
  std::vector<Span> written_;
  bool isKnown_ = true;
};

}  // namespace bagua
