// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/codec.h"
#include "kernels/codecs/block_scaled/block_scaled_loops.h"
#include "kernels/codecs/block_scaled/block_scaled_source_of.h"
#include "kernels/integers.h"
#include "kernels/processor.h"
#include "kernels/share_out.h"
#include "kernels/tensor_elements.h"
#if BAGUA_WITH_CUDA
#include "kernels/codecs/block_scaled/block_scaled_cuda_codec.h"
#endif

// The block codecs as Codec, and their registration: int8, 4bit, 2bit and 1bit. The formats are in
// block_scaled_formats.h.
namespace bagua::block_scaled {
namespace {

// Groups that a thread takes at a time: enough to outweigh waking it.
constexpr int64_t kGroupsOfThread = 128;

// Groups whose sums are made at once, and stay in the nearest cache.
constexpr int64_t kGroupsOfMean = 16;

// In errors.
constexpr const char* kWhat = "a block codec";

// Those that this machine can run, the fastest last.
std::vector<const Loops*> availableLoops() {
  std::vector<const Loops*> available = {&scalarLoops()};
#if defined(__x86_64__)
  if (hasAvx2()) available.push_back(&avx2Loops());
  if (hasAvx512()) available.push_back(&avx512Loops());
#endif
  return available;
}

struct Format {
  FormatLoops Loops::*loops;
  int64_t groupBytes;
  // Whether the decoder has to know the key, which then is the header.
  bool isRotated;
#if BAGUA_WITH_CUDA
  const cuda::FormatKernels& (*kernels)();
#endif

  [[nodiscard]] PackedLayout layout() const {
    return {.headerBytes = isRotated ? static_cast<int64_t>(sizeof(uint64_t)) : 0,
            .groupElements = kGroup,
            .groupBytes = groupBytes,
            .alignment = 1};
  }
};

std::shared_ptr<const Codec> onCuda([[maybe_unused]] const Format& format) {
#if BAGUA_WITH_CUDA
  return std::make_shared<cuda::CudaCodec>(format.layout(), format.kernels(), cudaDevice());
#else
  return nullptr;
#endif
}

// `onCuda` takes tensors of CUDA; null in a build without it, where nobody has any.
class BlockCodec final : public Codec {
 public:
  BlockCodec(const Format& format, const Loops& loops, std::shared_ptr<const Codec> onCuda)
      : format_(format), layout_(format.layout()), loops_(loops.*format.loops), onCuda_(std::move(onCuda)) {}

  [[nodiscard]] PackedLayout layout() const override { return layout_; }

  [[nodiscard]] bool canRoundStochastically() const override { return true; }
  [[nodiscard]] bool usesKey(Rounding rounding) const override {
    return format_.isRotated || rounding == Rounding::kStochastic;
  }

  void start(const at::Tensor& values, const Encoding& encoding, at::Tensor& packed) const override {
    if (packed.is_cuda()) return onCuda_->start(values, encoding, packed);
    // Nothing is packed without memory.
    if (packed.numel() == 0) return;
    auto* bytes = mutableDataOf<uint8_t>(packed);
    const int64_t used = layout_.packedBytes(values.numel());
    if (format_.isRotated) std::memcpy(bytes, &encoding.key, sizeof(encoding.key));
    std::memset(bytes + used, 0, static_cast<size_t>(packed.numel() - used));
  }

  void encode(const at::Tensor& values, const Piece& piece, const Encoding& encoding,
              at::Tensor& packed) const override {
    if (values.is_cuda()) return onCuda_->encode(values, piece, encoding, packed);
    encoding.restoreIfLost(piece);
    auto* bytes = mutableDataOf<uint8_t>(packed);
    withElement(values.scalar_type(), kWhat, [&](auto element) {
      using Element = decltype(element);
      const auto source = sourceOf<Element>(values, encoding);
      forParts(piece, kGroupsOfThread, [&](int64_t begin, int64_t end) {
        loops_.of<Element>().encode(source, begin, end, bytes + offsetOf(begin));
      });
    });
  }

  void decode(const at::Tensor& packed, const Piece& piece, at::Tensor& values) const override {
    if (values.is_cuda()) return onCuda_->decode(packed, piece, values);
    const auto* bytes = dataOf<uint8_t>(packed);
    withElement(values.scalar_type(), kWhat, [&](auto element) {
      using Element = decltype(element);
      forParts(piece, kGroupsOfThread, [&](int64_t begin, int64_t end) {
        loops_.of<Element>().decode(bytes + offsetOf(begin), keyOf(bytes), begin, end, mutableDataOf<Element>(values));
      });
    });
  }

  void decodeAdd(const at::Tensor& packed, const Piece& piece, at::ScalarType dtype, at::Tensor& sums) const override {
    if (sums.is_cuda()) return onCuda_->decodeAdd(packed, piece, dtype, sums);
    const auto* bytes = dataOf<uint8_t>(packed);
    withElement(dtype, kWhat, [&](auto element) {
      using Element = decltype(element);
      using T = ElementTraits<Element>::Compute;
      forParts(piece, kGroupsOfThread, [&](int64_t begin, int64_t end) {
        loops_.of<Element>().add(bytes + offsetOf(begin), keyOf(bytes), begin, end,
                                 mutableDataOf<T>(sums) + (begin - piece.begin));
      });
    });
  }

  void decodeMean(const at::Tensor& copies, const Piece& piece, double divisor, const Encoding& encoding,
                  at::Tensor& mean, at::Tensor& packed) const override {
    if (mean.is_cuda()) return onCuda_->decodeMean(copies, piece, divisor, encoding, mean, packed);
    withElement(mean.scalar_type(), kWhat, [&](auto element) {
      using Element = decltype(element);
      forParts(piece, kGroupsOfMean, [&](int64_t begin, int64_t end) {
        meanOfPart<Element>(copies, divisor, begin, end, mutableDataOf<Element>(mean));
      });
    });
    startIfComplete(mean, piece, encoding, packed);
  }

  void encodeChunks(const at::Tensor& values, int64_t chunkLength, const Encoding& encoding,
                    at::Tensor& packed) const override {
    if (values.is_cuda()) return onCuda_->encodeChunks(values, chunkLength, encoding, packed);
    Codec::encodeChunks(values, chunkLength, encoding, packed);
  }

  void decodeChunks(const at::Tensor& packed, int64_t chunkLength, at::Tensor& values) const override {
    if (values.is_cuda()) return onCuda_->decodeChunks(packed, chunkLength, values);
    Codec::decodeChunks(packed, chunkLength, values);
  }

 private:
  // Of a group's first element.
  [[nodiscard]] int64_t offsetOf(int64_t element) const {
    return layout_.headerBytes + element / kGroup * layout_.groupBytes;
  }

  [[nodiscard]] uint64_t keyOf(const uint8_t* packed) const {
    uint64_t key = 0;
    if (format_.isRotated) std::memcpy(&key, packed, sizeof(key));
    return key;
  }

  // Shares a piece out in parts of some groups.
  template <class F>
  static void forParts(const Piece& piece, int64_t groups, const F& f) {
    const int64_t step = groups * kGroup;
    const int64_t parts = ceilDivide(piece.end - piece.begin, step);
    shareOut(parts, std::max<int64_t>(kGroupsOfThread / groups, 1), [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        f(piece.begin + i * step, std::min(piece.begin + (i + 1) * step, piece.end));
      }
    });
  }

  template <class Element>
  void meanOfPart(const at::Tensor& copies, double divisor, int64_t begin, int64_t end, Element* mean) const {
    using T = ElementTraits<Element>::Compute;
    const ElementLoops<Element>& loops = loops_.of<Element>();
    T sums[kGroupsOfMean * kGroup] = {};
    for (int64_t copy = 0; copy < copies.size(0); ++copy) {
      const uint8_t* row = dataOf<uint8_t>(copies) + copy * copies.stride(0);
      loops.add(row + offsetOf(begin), keyOf(row), begin, end, sums);
    }
    loops.divide(sums, static_cast<T>(divisor), end - begin, mean + begin);
  }

  const Format& format_;
  const PackedLayout layout_;
  const FormatLoops& loops_;
  const std::shared_ptr<const Codec> onCuda_;
};

template <class Layout, FormatLoops Loops::*kLoops>
const Format& formatOf() {
  static constexpr Format kFormat = {
    kLoops,
    kBytesOfGroup<Layout>,
    Layout::kIsRotated,
#if BAGUA_WITH_CUDA
    cuda::kernelsOf<Layout>
#endif
  };
  return kFormat;
}

// On each instruction set, the one in use last.
std::vector<std::shared_ptr<const Codec>> codecsOf(const Format& format) {
  std::vector<std::shared_ptr<const Codec>> codecs;
  const auto onItsDevice = onCuda(format);
  for (const Loops* loops : availableLoops()) {
    codecs.push_back(std::make_shared<BlockCodec>(format, *loops, onItsDevice));
  }
  return codecs;
}

const auto kInt8 = codecsOf(formatOf<EightBits, &Loops::eightBits>());
const auto k4bit = codecsOf(formatOf<FourBits, &Loops::fourBits>());
const auto k2bit = codecsOf(formatOf<TwoBits, &Loops::twoBits>());
const auto k1bit = codecsOf(formatOf<OneBit, &Loops::oneBit>());

}  // namespace
}  // namespace bagua::block_scaled

BAGUA_REGISTER_CODEC({
    .name = "int8",
    .summary = "one byte per element, a scale for every 128",
    .position = 20,
    .codec = bagua::block_scaled::kInt8.back(),
    .variants = bagua::block_scaled::kInt8,
})
BAGUA_REGISTER_CODEC({
    .name = "4bit",
    .summary = "sixteen levels, a scale for every 16 elements",
    .position = 30,
    .codec = bagua::block_scaled::k4bit.back(),
    .variants = bagua::block_scaled::k4bit,
})
BAGUA_REGISTER_CODEC({
    .name = "2bit",
    .summary = "four levels after a random rotation of 128 elements",
    .position = 40,
    .codec = bagua::block_scaled::k2bit.back(),
    .variants = bagua::block_scaled::k2bit,
})
BAGUA_REGISTER_CODEC({
    .name = "1bit",
    .summary = "the sign after a random rotation of 128 elements",
    .position = 50,
    .codec = bagua::block_scaled::k1bit.back(),
    .variants = bagua::block_scaled::k1bit,
})
