// SPDX-License-Identifier: Apache-2.0
#include "kernels/loops/small_numbers/small_numbers.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "kernels/device_ways.h"

namespace bagua {
namespace {

constexpr int64_t kGroup = 128;
// Of float32: 2^e = (e + bias) << mantissa bits.
constexpr int kMantissaBits = 23;
constexpr int kBias = 127;
constexpr float kMostCode = 127;
// No scale is a denormal, nor is its inverse; a code times its scale stays below 2^127.
constexpr int kLeastExponent = 1;
constexpr int kMostExponent = kBias + 120;
constexpr float kMostNumber = 1.7e38F;

float powerOfTwo(int exponent) { return std::bit_cast<float>(exponent << kMantissaBits); }

// Adding this to a number below 2^22 rounds it to a whole one, which the lowest bits then hold.
constexpr float kRounding = 12582912;
constexpr int32_t kRoundingBits = std::bit_cast<int32_t>(kRounding);

uint8_t encodeGroup(const float* values, int64_t count, int8_t* codes) {
  // Magnitudes are in the order of their bits.
  int32_t mostBits = 0;
  for (int64_t i = 0; i < count; ++i) mostBits = std::max(mostBits, std::bit_cast<int32_t>(values[i]) & 0x7FFFFFFF);
  const float most = std::min(std::bit_cast<float>(mostBits), kMostNumber) / kMostCode;
  // Rounded up to a power of two.
  const int32_t above = (std::bit_cast<int32_t>(most) + (1 << kMantissaBits) - 1) >> kMantissaBits;
  const int exponent = std::clamp<int32_t>(above, kLeastExponent, kMostExponent);
  const float inverse = powerOfTwo(2 * kBias - exponent);
  for (int64_t i = 0; i < count; ++i) {
    const float scaled = values[i] * inverse;
    const float low = scaled < -kMostCode ? -kMostCode : scaled;
    const float bounded = low > kMostCode ? kMostCode : low;
    codes[i] = static_cast<int8_t>(std::bit_cast<int32_t>(bounded + kRounding) - kRoundingBits);
  }
  return static_cast<uint8_t>(exponent);
}

void decodeGroup(const int8_t* codes, int64_t count, uint8_t exponent, float* values) {
  const float scale = powerOfTwo(exponent);
  for (int64_t i = 0; i < count; ++i) values[i] = static_cast<float>(codes[i]) * scale;
}

int64_t groupsOf(int64_t numel) { return (numel + kGroup - 1) / kGroup; }

// Calls visit(begin, count, group) for each group.
template <typename Visit>
void forGroups(int64_t numel, Visit&& visit) {
  for (int64_t begin = 0; begin < numel; begin += kGroup) {
    visit(begin, std::min(kGroup, numel - begin), begin / kGroup);
  }
}

SmallNumbers allocated(const at::Tensor& values) {
  return {at::empty({values.numel()}, values.options().dtype(at::kChar)),
          at::empty({groupsOf(values.numel())}, values.options().dtype(at::kByte))};
}

// --- On other devices: the same by ATen, with zeros behind the last group --------------------------------------------

at::Tensor inGroups(const at::Tensor& flat) {
  const int64_t missing = groupsOf(flat.numel()) * kGroup - flat.numel();
  const at::Tensor whole = missing > 0 ? at::cat({flat, at::zeros({missing}, flat.options())}) : flat;
  return whole.view({-1, kGroup});
}

at::Tensor powersOfTwo(const at::Tensor& exponents) {
  return exponents.to(at::kInt).bitwise_left_shift(kMantissaBits).view(at::kFloat).unsqueeze(1);
}

SmallNumbers encodedByAten(const at::Tensor& values) {
  const at::Tensor groups = inGroups(values);
  // A tensor: CUDA would multiply with the reciprocal of a number, and round differently.
  const at::Tensor divisor = at::full({}, kMostCode, values.options());
  const at::Tensor most = groups.abs().amax(1).clamp_max_(kMostNumber).div_(divisor);
  const at::Tensor exponents = most.view(at::kInt)
                                   .add((1 << kMantissaBits) - 1)
                                   .bitwise_right_shift_(kMantissaBits)
                                   .clamp_(kLeastExponent, kMostExponent);
  const at::Tensor inverse = powersOfTwo(exponents.neg().add_(2 * kBias));
  const at::Tensor codes = groups.mul(inverse).clamp_(-kMostCode, kMostCode).round_().to(at::kChar);
  return {codes.view(-1).narrow(0, 0, values.numel()), exponents.to(at::kByte)};
}

at::Tensor decodedByAten(const SmallNumbers& numbers) {
  const at::Tensor values = inGroups(numbers.codes).to(at::kFloat).mul_(powersOfTwo(numbers.exponents));
  return values.view(-1).narrow(0, 0, numbers.codes.numel());
}

}  // namespace

SmallNumbers SmallNumbers::encoded(const at::Tensor& values) {
  if (values.numel() == 0) return allocated(values);
  if (!worksOnCpu(values)) return encodedByAten(values);
  SmallNumbers made = allocated(values);
  const auto* numbers = values.const_data_ptr<float>();
  auto* codes = made.codes.mutable_data_ptr<int8_t>();
  auto* exponents = made.exponents.mutable_data_ptr<uint8_t>();
  forGroups(values.numel(), [&](int64_t begin, int64_t count, int64_t group) {
    exponents[group] = encodeGroup(numbers + begin, count, codes + begin);
  });
  return made;
}

SmallNumbers SmallNumbers::blended(const SmallNumbers& old, float keep, const at::Tensor& left, float gain) {
  if (left.numel() == 0) return allocated(left);
  // Two products and a sum, each rounded: a sum that takes the factor would be rounded once.
  if (!worksOnCpu(left)) return encodedByAten(decodedByAten(old).mul_(keep).add_(left.mul(gain)));
  SmallNumbers made = allocated(left);
  const auto* numbers = left.const_data_ptr<float>();
  const auto* oldCodes = old.codes.const_data_ptr<int8_t>();
  const auto* oldExponents = old.exponents.const_data_ptr<uint8_t>();
  auto* codes = made.codes.mutable_data_ptr<int8_t>();
  auto* exponents = made.exponents.mutable_data_ptr<uint8_t>();
  forGroups(left.numel(), [&](int64_t begin, int64_t count, int64_t group) {
    float blend[kGroup];
    decodeGroup(oldCodes + begin, count, oldExponents[group], blend);
    for (int64_t i = 0; i < count; ++i) blend[i] = blend[i] * keep + numbers[begin + i] * gain;
    exponents[group] = encodeGroup(blend, count, codes + begin);
  });
  return made;
}

at::Tensor SmallNumbers::decoded() const {
  if (codes.numel() == 0) return at::empty({0}, codes.options().dtype(at::kFloat));
  if (!worksOnCpu(codes)) return decodedByAten(*this);
  at::Tensor values = at::empty({codes.numel()}, codes.options().dtype(at::kFloat));
  auto* numbers = values.mutable_data_ptr<float>();
  const auto* its = codes.const_data_ptr<int8_t>();
  const auto* scales = exponents.const_data_ptr<uint8_t>();
  forGroups(codes.numel(), [&](int64_t begin, int64_t count, int64_t group) {
    decodeGroup(its + begin, count, scales[group], numbers + begin);
  });
  return values;
}

int64_t SmallNumbers::bytes() const { return static_cast<int64_t>(codes.nbytes() + exponents.nbytes()); }

}  // namespace bagua
