// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>

namespace bagua::fuzz {

// Values made of the fuzzer's bytes, from the first to the last; zeros when there are no more.
class FuzzedBytes {
 public:
  FuzzedBytes(const uint8_t* data, size_t size) : data_(data), left_(size) {}

  [[nodiscard]] size_t left() const { return left_; }

  template <typename T>
  T take() {
    T value{};
    const size_t count = std::min(sizeof(T), left_);
    if (count > 0) std::memcpy(&value, data_, count);
    skip(count);
    return value;
  }

  bool coin() { return take<uint8_t>() % 2 == 1; }

  int64_t from(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(take<uint32_t>() % static_cast<uint64_t>(high - low + 1));
  }

  // What somebody claims: mostly plausible, sometimes anything.
  int64_t claim() {
    switch (take<uint8_t>() % 4) {
      case 0:
        return take<uint8_t>();
      case 1:
        return take<uint16_t>();
      case 2:
        return take<int64_t>();
      default:
        return std::numeric_limits<int64_t>::max() - take<uint8_t>();
    }
  }

  std::string text(size_t most) {
    const size_t count = std::min({static_cast<size_t>(take<uint8_t>()), most, left_});
    std::string text(reinterpret_cast<const char*>(data_), count);
    skip(count);
    return text;
  }

  // All that `bytes` has room for; what is missing is zeros.
  void fill(void* bytes, size_t count) {
    const size_t known = std::min(count, left_);
    if (known > 0) std::memcpy(bytes, data_, known);
    std::memset(static_cast<uint8_t*>(bytes) + known, 0, count - known);
    skip(known);
  }

  // Memory of its own of exactly that size: AddressSanitizer sees whoever reads past it.
  at::Tensor tensor(int64_t numel) {
    at::Tensor bytes = at::empty({numel}, at::kByte);
    if (numel > 0) fill(bytes.mutable_data_ptr(), static_cast<size_t>(numel));
    return bytes;
  }

 private:
  void skip(size_t count) {
    data_ += count;
    left_ -= count;
  }

  const uint8_t* data_;
  size_t left_;
};

}  // namespace bagua::fuzz
