// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <limits>
#include <string>
#include <vector>

#include "tests/contract/codec_contract.h"

namespace bagua {

// What every registered codec promises on a device: what it does on the CPU, bit for bit, but for the bits of a NaN.
// A test says which codec works there, and how a tensor comes there.
class CodecDeviceContract : public CodecContract {
 protected:
  // Where a case runs: there, or on the CPU.
  struct Side {
    const Codec& codec;
    // Copies a tensor to it.
    at::Tensor (*to)(const at::Tensor&);
  };

  // Puts bytes in rows that are further apart than they have to be: `distance` from a begin to the next.
  [[nodiscard]] static at::Tensor rowsOn(const Side& side, const at::Tensor& rows, int64_t distance) {
    const int64_t bytes = rows.size(1);
    const at::Tensor flat = at::full({(rows.size(0) - 1) * distance + bytes}, 0xA5, at::kByte);
    flat.as_strided(rows.sizes(), {distance, 1}).copy_(rows);
    return side.to(flat).as_strided(rows.sizes(), {distance, 1});
  }

  enum class Memory { kNone, kInPlace, kOfAStepThatCounts, kAfterALostStep };
  static constexpr Memory kMemories[] = {Memory::kNone, Memory::kInPlace, Memory::kOfAStepThatCounts,
                                         Memory::kAfterALostStep};

  // With the residuals of `values`; the same for every call.
  [[nodiscard]] static Encoding encodingOn(const Side& side, Memory memory, const at::Tensor& values) {
    // Chosen by the length, so that both are met.
    const bool isRandom = side.codec.canRoundStochastically() && values.numel() % 3 == 0;
    Encoding encoding{.rounding = isRandom ? Rounding::kStochastic : Rounding::kNearest, .key = 0x0123456789ABCDEF};
    if (memory == Memory::kNone) return encoding;
    const at::Tensor kept = side.to(at::arange(values.numel(), at::kFloat).sin() * 0.1);
    encoding.residual = encoding.nextResidual = kept;
    if (memory == Memory::kInPlace) return encoding;
    const bool wasLost = memory == Memory::kAfterALostStep;
    (wasLost ? encoding.residual : encoding.nextResidual) = side.to(at::full({values.numel()}, 7.0F));
    encoding.wasLost = side.to(at::full({}, wasLost, at::kBool));
    return encoding;
  }

  using Tensors = std::vector<at::Tensor>;

  // What a case leaves behind on each side: `f(side)` makes its tensors with side.to(), and returns what to compare.
  template <class F>
  static void expectTheSame(const Side& device, const F& f) {
    const Tensors onCpu = f(Side{codec(), [](const at::Tensor& tensor) { return tensor.clone(); }});
    const Tensors onDevice = f(device);
    for (size_t i = 0; i < onCpu.size(); ++i) {
      ASSERT_TRUE(sameNumbers(onCpu[i], onDevice[i].cpu())) << "result " << i;
    }
  }

  // The longest one is more than the blocks of a small device take at a time.
  [[nodiscard]] static std::vector<int64_t> lengths() {
    const int64_t group = codec().layout().groupElements;
    return {0, 1, group - 1, group, group + 1, 3 * group + 1, 9'003};
  }

  // f(values, memory, number of the call) for values of every type and length, with one that is not finite in some.
  template <class F>
  static void forValuesAndMemories(const F& f) {
    int number = 0;
    forValues(lengths(), [&](const at::Tensor& values) {
      if (values.numel() == 3 * codec().layout().groupElements + 1) {
        values[values.numel() / 2] = std::numeric_limits<double>::quiet_NaN();
      }
      for (const Memory memory : kMemories) {
        SCOPED_TRACE("memory " + std::to_string(static_cast<int>(memory)));
        f(values, memory, number++);
        if (HasFatalFailure()) return;
      }
    });
  }

  static void codesAndDecodesLikeTheCpu(const Side& device) {
    forValuesAndMemories([&](const at::Tensor& values, Memory memory, int number) {
      codesLikeTheCpu(device, values, memory, kExtras[number % std::size(kExtras)]);
    });
  }

  static void codesSpecialValuesLikeTheCpu(const Side& device) {
    for (const auto dtype : kTypes) {
      const Tensors all = specialValues(dtype);
      for (size_t i = 0; i < all.size(); ++i) {
        SCOPED_TRACE(std::string(c10::toString(dtype)) + ", special values " + std::to_string(i));
        codesLikeTheCpu(device, all[i], kMemories[i % std::size(kMemories)], 0);
        if (HasFatalFailure()) return;
      }
    }
  }

  static void decodesDamagedPacketsLikeTheCpu(const Side& device) {
    const int64_t length = 2 * codec().layout().groupElements + 5;
    for (const auto dtype : kTypes) {
      for (int i = 0; i < 20; ++i) {
        const at::Tensor bytes = at::randint(256, {packedFor(length).numel()}, at::kByte);
        expectTheSame(device, [&](const Side& side) -> Tensors {
          at::Tensor values = side.to(at::full({length}, 7, dtype));
          side.codec.decode(side.to(bytes), {0, length}, values);
          return {values};
        });
        if (HasFatalFailure()) return;
      }
    }
  }

  // The last ones are shorter or empty.
  static void codesManyChunksLikeTheCpu(const Side& device) {
    forValuesAndMemories([&](const at::Tensor& values, Memory memory, int number) {
      const int64_t chunkLength = values.numel() == 0 ? 0 : values.numel() / 3 + 1 + number / 4 % 2;
      const at::Tensor rows = packedFor(chunkLength, kExtras[number % std::size(kExtras)]).repeat({6, 1});
      expectTheSame(device, [&](const Side& side) -> Tensors {
        const Encoding encoding = encodingOn(side, memory, values);
        at::Tensor packed = rowsOn(side, rows, rows.size(1) + int64_t{number % 5} * 3);
        side.codec.encodeChunks(side.to(values), chunkLength, encoding, packed);
        at::Tensor decoded = side.to(at::full_like(values, 7));
        side.codec.decodeChunks(packed, chunkLength, decoded);
        return with({packed, decoded}, encoding);
      });
    });
  }

  // About the numbers of partial sums.
  static void makesTheMeansOfAnyNumberOfCopies(const Side& device) {
    constexpr int64_t kLength = 600;
    for (const auto dtype : kTypes) {
      for (const int64_t count : {1, 2, 4, 5, 8, 9, 16, 17, 32, 33, 70}) {
        SCOPED_TRACE(std::string(c10::toString(dtype)) + ", copies " + std::to_string(count));
        Tensors copies;
        // One is a sum that no half holds.
        const bool isSum = count == 33;
        for (int64_t copy = 0; copy < count; ++copy) {
          // Sums round otherwise in another order.
          const double scale = copy % 8 == 7 ? 1e-30 : isSum ? 2000.0 : 1.0;
          copies.push_back(encoded(((at::randn({kLength}, at::kDouble) + copy % 5) * scale).to(dtype)));
        }
        const at::Tensor rows = at::stack(copies);
        expectTheSame(device, [&](const Side& side) -> Tensors {
          at::Tensor mean = side.to(at::full({kLength}, 7, dtype));
          at::Tensor packed = side.to(packedFor(kLength));
          side.codec.decodeMeanAndEncode(side.to(rows), isSum ? 1 : static_cast<double>(count), {}, mean, packed);
          return {mean, packed};
        });
        if (HasFatalFailure()) return;
      }
    }
  }

  static void makesTheMeansOfTheCpu(const Side& device) {
    forValuesAndMemories([&](const at::Tensor& values, Memory memory, int number) {
      constexpr int64_t kCopies[] = {1, 2, 3, 9, 17, 35};
      const int64_t count = kCopies[number / 4 % std::size(kCopies)];
      Tensors copies;
      for (int64_t copy = 0; copy < count; ++copy) copies.push_back(encoded(values * (copy % 3 - 1.25)));
      const at::Tensor rows = at::stack(copies);
      const bool isAtOnce = number % 7 < 4;
      const Piece all{0, values.numel()};
      expectTheSame(device, [&](const Side& side) -> Tensors {
        const Encoding encoding = encodingOn(side, memory, values);
        const at::Tensor received = rowsOn(side, rows, rows.size(1) + int64_t{number % 5} * 3);
        at::Tensor mean = side.to(at::full_like(values, 7));
        at::Tensor packed = side.to(packedFor(values.numel(), kExtras[number % std::size(kExtras)]));
        const auto divisor = static_cast<double>(count);
        if (isAtOnce) {
          side.codec.decodeMeanAndEncode(received, divisor, encoding, mean, packed);
        } else {
          side.codec.decodeMean(received, all, divisor, encoding, mean, packed);
          side.codec.encode(mean, all, encoding, packed);
        }
        return with({mean, packed}, encoding);
      });
    });
  }

 private:
  // Bytes behind a packed chunk.
  static constexpr int64_t kExtras[] = {0, 5, 64};

  // Values that formats treat unlike others.
  static Tensors specialValues(at::ScalarType dtype) {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    const int64_t length = 2 * codec().layout().groupElements + 5;
    const double largest = dtype == at::kDouble ? 1.7e308 : dtype == at::kHalf ? 65'504 : 3.3e38;
    const at::Tensor normal = at::randn({length}, at::kDouble);
    Tensors all = {
        at::zeros_like(normal),
        -at::zeros_like(normal),
        at::full_like(normal, 3.7),
        1000 + normal * 1e-4,
        normal * 1e-30,
        normal * 1e-41,
        normal * 1e-310,
        normal.sign() * largest,
        normal.clamp(-1, 1) * largest,
        normal * at::pow(10, at::randn({length}, at::kDouble) * 8),
    };
    for (const double odd : {std::numeric_limits<double>::quiet_NaN(), kInfinity, -kInfinity}) {
      all.push_back(normal.clone());
      all.back()[length - 1] = odd;
    }
    for (at::Tensor& values : all) values = values.to(dtype);
    return all;
  }

  static void codesLikeTheCpu(const Side& device, const at::Tensor& values, Memory memory, int64_t extra) {
    const Piece all{0, values.numel()};
    expectTheSame(device, [&](const Side& side) -> Tensors {
      const at::Tensor x = side.to(values);
      const Encoding encoding = encodingOn(side, memory, values);
      at::Tensor packed = side.to(packedFor(values.numel(), extra));
      side.codec.start(x, encoding, packed);
      side.codec.encode(x, all, encoding, packed);
      at::Tensor decoded = side.to(at::full_like(values, 7));
      side.codec.decode(packed, all, decoded);
      at::Tensor sums = side.to(at::arange(values.numel(), computeType(values.scalar_type())));
      side.codec.decodeAdd(packed, all, values.scalar_type(), sums);
      return with({packed, decoded, sums}, encoding);
    });
  }

  [[nodiscard]] static Tensors with(Tensors results, const Encoding& encoding) {
    if (!encoding.hasFeedback()) return results;
    results.push_back(encoding.residual);
    results.push_back(encoding.nextResidual);
    return results;
  }

  // Only where values were not finite may there be a NaN, and its bits are the processor's.
  [[nodiscard]] static bool sameNumbers(const at::Tensor& a, const at::Tensor& b) {
    if (!a.is_floating_point()) return sameBits(a, b);
    return sameBits(a.isnan(), b.isnan()) && sameBits(a.masked_fill(a.isnan(), 0), b.masked_fill(b.isnan(), 0));
  }
};

}  // namespace bagua
