// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/codec.h"

// What the contract tests of codecs share: one test per registered codec, on values of every type.
namespace bagua {

constexpr at::ScalarType kTypes[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16};

// In which sums are made and residuals are added.
inline at::ScalarType computeType(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

// Those that take tensors there, for tests of each.
inline std::vector<std::string> codecsOn(at::DeviceType device) {
  std::vector<std::string> names = CodecRegistry::names();
  std::erase_if(names, [&](const std::string& name) { return !CodecRegistry::find(name).takes(device); });
  return names;
}

inline bool sameBits(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.numel() != b.numel()) return false;
  // Nothing has no address.
  if (a.numel() == 0) return true;
  return std::memcmp(a.contiguous().const_data_ptr(), b.contiguous().const_data_ptr(), a.nbytes()) == 0;
}

class CodecContract : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { at::manual_seed(23); }

  [[nodiscard]] static const CodecInfo& info() { return CodecRegistry::find(GetParam()); }
  [[nodiscard]] static const Codec& codec() { return *info().codec; }

  // Nothing, less than a group, about a group, some groups, and more than threads take at a time.
  [[nodiscard]] static std::vector<int64_t> lengths() {
    const int64_t group = codec().layout().groupElements;
    return {0, 1, group - 1, group, group + 1, 3 * group + 1, 17'001};
  }

  // f(values) for every type and length, of values about zero or about something else.
  template <class F>
  static void forValues(const F& f) {
    forValues(lengths(), f);
  }

  template <class F>
  static void forValues(const std::vector<int64_t>& lengths, const F& f) {
    for (const auto dtype : kTypes) {
      for (const int64_t length : lengths) {
        SCOPED_TRACE(std::string(c10::toString(dtype)) + " " + std::to_string(length));
        f((at::randn({length}, at::kDouble) + (length % 2 == 0 ? 0 : 3)).to(dtype));
        if (HasFatalFailure()) return;
      }
    }
  }

  // Full of what must not be seen later.
  [[nodiscard]] static at::Tensor packedFor(int64_t length, int64_t extra = 0, int fill = 0xA5) {
    return at::full({codec().layout().packedBytes(length) + extra}, fill, at::kByte);
  }

  [[nodiscard]] static at::Tensor encoded(const at::Tensor& values, const Encoding& encoding = {}, int64_t extra = 0,
                                          int fill = 0xA5) {
    return encodedBy(codec(), values, encoding, extra, fill);
  }

  [[nodiscard]] static at::Tensor encodedBy(const Codec& codec, const at::Tensor& values, const Encoding& encoding = {},
                                            int64_t extra = 0, int fill = 0xA5) {
    at::Tensor packed = packedFor(values.numel(), extra, fill);
    codec.start(values, encoding, packed);
    codec.encode(values, {0, values.numel()}, encoding, packed);
    return packed;
  }

  [[nodiscard]] static at::Tensor decoded(const at::Tensor& packed, const at::Tensor& like) {
    return decodedBy(codec(), packed, like);
  }

  [[nodiscard]] static at::Tensor decodedBy(const Codec& codec, const at::Tensor& packed, const at::Tensor& like) {
    at::Tensor values = at::full_like(like, 7);
    codec.decode(packed, {0, like.numel()}, values);
    return values;
  }

  // The chunk in a few pieces, some of them empty, cut where groups begin. Other pieces at every call.
  [[nodiscard]] static std::vector<Piece> pieces(int64_t length) {
    static std::mt19937_64 random(29);  // NOLINT(bugprone-random-generator-seed): the same in every run
    const int64_t group = codec().layout().groupElements;
    std::vector<int64_t> cuts = {0, 0, length, length};
    for (int i = 0; i < 4; ++i) {
      cuts.push_back(std::min(static_cast<int64_t>(random() % (length / group + 1)) * group, length));
    }
    std::sort(cuts.begin(), cuts.end());
    std::vector<Piece> result;
    for (size_t i = 1; i < cuts.size(); ++i) result.push_back({cuts[i - 1], cuts[i]});
    return result;
  }

  [[nodiscard]] static std::vector<Piece> shuffledPieces(int64_t length) {
    static std::mt19937_64 random(31);  // NOLINT(bugprone-random-generator-seed): the same in every run
    auto result = pieces(length);
    std::shuffle(result.begin(), result.end(), random);
    return result;
  }

  struct Residuals {
    at::Tensor residual;
    at::Tensor next;

    [[nodiscard]] Encoding encoding() const { return {.residual = residual, .nextResidual = next}; }
  };

  [[nodiscard]] static Residuals residualsFor(const at::Tensor& values) {
    return {at::randn({values.numel()}) * 0.1, at::full({values.numel()}, 7.0F)};
  }
};

}  // namespace bagua
