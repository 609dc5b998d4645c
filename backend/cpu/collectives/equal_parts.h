// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>

namespace bagua {

// Equal parts of a flat tensor, the last ones shorter or empty.
class EqualParts {
 public:
  EqualParts(const at::Tensor& flat, int count) : flat_(flat), length_((flat.numel() + count - 1) / count) {}

  [[nodiscard]] int64_t begin(int part) const { return std::min(part * length_, flat_.numel()); }
  [[nodiscard]] at::Tensor operator[](int part) const {
    return flat_.narrow(0, begin(part), begin(part + 1) - begin(part));
  }

 private:
  const at::Tensor& flat_;
  const int64_t length_;
};

}  // namespace bagua
