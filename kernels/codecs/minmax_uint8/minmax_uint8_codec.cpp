// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "kernels/codec.h"
#include "kernels/codecs/minmax_uint8/minmax_uint8_numbers.h"
#include "kernels/integers.h"
#include "kernels/share_out.h"
#include "kernels/tensor_elements.h"
#if BAGUA_WITH_CUDA
#include "kernels/codecs/minmax_uint8/minmax_uint8_cuda_codec.h"
#endif

// The original's 8-bit codec on the CPU, in plain loops that the compiler makes vectors of, and its registration.
namespace bagua::minmax_uint8 {
namespace {

// A thread takes so many elements at a time: enough to outweigh waking it.
constexpr int64_t kBlock = 16384;

// So many sums are made at once, and stay in the nearest cache.
constexpr int64_t kRun = 256;

// Calls f(block) for the elements of a piece, on several threads.
template <class F>
void forBlocks(const Piece& piece, const F& f) {
  shareOut(ceilDivide(piece.end - piece.begin, kBlock), 1, [&](int64_t first, int64_t last) {
    f(Piece{piece.begin + first * kBlock, std::min(piece.begin + last * kBlock, piece.end)});
  });
}

template <class Element>
Range<ComputeOf<Element>> rangeOf(const Element* values, const float* residual, const Piece& piece) {
  // Ranges side by side, which fit into vectors.
  constexpr int64_t kLanes = 16;
  using T = ComputeOf<Element>;
  T lows[kLanes];
  T highs[kLanes];
  std::fill(lows, lows + kLanes, emptyRange<T>().low);
  std::fill(highs, highs + kLanes, emptyRange<T>().high);
  const auto take = [&](int64_t lane, int64_t i) {
    const T value = sumAt(values, residual, i);
    const Range<T> range = merge<T>({lows[lane], highs[lane]}, {value, value});
    lows[lane] = range.low;
    highs[lane] = range.high;
  };
  int64_t i = piece.begin;
  for (; i + kLanes <= piece.end; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) take(lane, i + lane);
  }
  for (; i < piece.end; ++i) take(0, i);
  Range<T> all = emptyRange<T>();
  for (int64_t lane = 0; lane < kLanes; ++lane) all = merge<T>(all, {lows[lane], highs[lane]});
  return all;
}

// The pointers are those of the block's first element. The grid is a copy, which no store of a code can change.
template <class Element>
void encodeBlock(const Element* values, const float* residual, float* next, int64_t count,
                 const Grid<ComputeOf<Element>> grid, uint8_t* codes) {
  if (!grid.isFinite()) {
    std::memset(codes, 0, static_cast<size_t>(count));
    if (next != nullptr) std::memmove(next, residual, static_cast<size_t>(count) * sizeof(float));
  } else if (next == nullptr) {
    for (int64_t i = 0; i < count; ++i) codes[i] = quantize(ElementTraits<Element>::load(values[i]), grid);
  } else {
    for (int64_t i = 0; i < count; ++i) {
      const auto sum = sumAt(values, residual, i);
      codes[i] = quantize(sum, grid);
      next[i] = restOf<Element>(sum, codes[i], grid);
    }
  }
}

// The sums of `count` elements over all copies, in sums[0 .. count); `codes` are the first copy's.
template <class Element>
void addUp(const uint8_t* codes, int64_t distance, const std::vector<Grid<ComputeOf<Element>>>& grids, int64_t count,
           ComputeOf<Element>* sums) {
  const int64_t sumCount = partialSumCount(static_cast<int64_t>(grids.size()));
  std::fill(sums, sums + sumCount * kRun, ComputeOf<Element>{0});
  for (size_t copy = 0; copy < grids.size(); ++copy) {
    const Grid<ComputeOf<Element>> grid = grids[copy];
    const uint8_t* from = codes + static_cast<int64_t>(copy) * distance;
    ComputeOf<Element>* sum = sums + static_cast<int64_t>(copy) % sumCount * kRun;
    // Rounded to the tensor's type first: the original decodes into a tensor before it adds.
    for (int64_t i = 0; i < count; ++i) sum[i] += ElementTraits<Element>::load(dequantize<Element>(from[i], grid));
  }
  for (int64_t half = sumCount / 2 * kRun; half >= kRun; half /= 2) {
    for (int64_t i = 0; i < half; ++i) sums[i] += sums[half + i];
  }
}

// `onCuda` takes tensors of CUDA; null in a build without it, where nobody has any.
class MinMaxUInt8Codec final : public Codec {
 public:
  explicit MinMaxUInt8Codec(std::shared_ptr<const Codec> onCuda) : onCuda_(std::move(onCuda)) {}

  [[nodiscard]] static PackedLayout packedLayout() {
    return {.headerBytes = kHeaderBytes, .groupElements = kAlignment, .groupBytes = kAlignment, .alignment = 1};
  }
  [[nodiscard]] PackedLayout layout() const override { return packedLayout(); }

  void start(const at::Tensor& values, const Encoding& encoding, at::Tensor& packed) const override {
    if (values.is_cuda()) return onCuda_->start(values, encoding, packed);
    const int64_t length = values.numel();
    encoding.restoreIfLost({0, length});
    auto* bytes = mutableDataOf<uint8_t>(packed);
    withElement(values.scalar_type(), kWhat, [&](auto element) {
      using Element = decltype(element);
      std::mutex mutex;
      auto range = emptyRange<ComputeOf<Element>>();
      forBlocks({0, length}, [&](const Piece& block) {
        const auto part = rangeOf(dataOf<Element>(values), residualOf(encoding), block);
        const std::lock_guard<std::mutex> lock(mutex);
        range = merge(range, part);
      });
      writeHeader<Element>(headerRange<Element>(range, length), bytes);
    });
    std::memset(bytes + kHeaderBytes + length, 0, static_cast<size_t>(packed.numel() - kHeaderBytes - length));
  }

  void encode(const at::Tensor& values, const Piece& piece, const Encoding& encoding,
              at::Tensor& packed) const override {
    if (values.is_cuda()) return onCuda_->encode(values, piece, encoding, packed);
    encoding.restoreIfLost(piece);
    const float* residual = residualOf(encoding);
    float* next = encoding.hasFeedback() ? mutableDataOf<float>(encoding.nextResidual) : nullptr;
    auto* bytes = mutableDataOf<uint8_t>(packed);
    withElement(values.scalar_type(), kWhat, [&](auto element) {
      using Element = decltype(element);
      const auto grid = gridOf<Element>(bytes);
      forBlocks(piece, [&](const Piece& block) {
        encodeBlock(dataOf<Element>(values) + block.begin, residual == nullptr ? nullptr : residual + block.begin,
                    next == nullptr ? nullptr : next + block.begin, block.end - block.begin, grid,
                    bytes + kHeaderBytes + block.begin);
      });
    });
  }

  void decode(const at::Tensor& packed, const Piece& piece, at::Tensor& values) const override {
    if (values.is_cuda()) return onCuda_->decode(packed, piece, values);
    withElement(values.scalar_type(), kWhat, [&](auto element) {
      using Element = decltype(element);
      const auto grid = gridOf<Element>(dataOf<uint8_t>(packed));
      const auto* codes = dataOf<uint8_t>(packed) + kHeaderBytes;
      auto* to = mutableDataOf<Element>(values);
      forBlocks(piece, [&, grid](const Piece& block) {
        if (!grid.isFinite()) return std::fill(to + block.begin, to + block.end, ElementTraits<Element>::nan());
        for (int64_t i = block.begin; i < block.end; ++i) to[i] = dequantize<Element>(codes[i], grid);
      });
    });
  }

  // In the order of the original, which by default would be that of the rows.
  void decodeMean(const at::Tensor& copies, const Piece& piece, double divisor, const Encoding& encoding,
                  at::Tensor& mean, at::Tensor& packed) const override {
    if (mean.is_cuda()) return onCuda_->decodeMean(copies, piece, divisor, encoding, mean, packed);
    const auto rows = rowsOf<const uint8_t>(copies);
    withElement(mean.scalar_type(), kWhat, [&](auto element) {
      using Element = decltype(element);
      using T = ComputeOf<Element>;
      std::vector<Grid<T>> grids;
      for (int64_t copy = 0; copy < copies.size(0); ++copy) grids.push_back(gridOf<Element>(rows.row(copy)));
      forBlocks(piece, [&](const Piece& block) {
        T sums[kMostPartialSums * kRun];
        for (int64_t begin = block.begin; begin < block.end; begin += kRun) {
          const int64_t count = std::min(kRun, block.end - begin);
          addUp<Element>(rows.bytes + kHeaderBytes + begin, rows.distance, grids, count, sums);
          auto* to = mutableDataOf<Element>(mean) + begin;
          for (int64_t i = 0; i < count; ++i) to[i] = ElementTraits<Element>::store(sums[i] / static_cast<T>(divisor));
        }
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
  // In errors.
  static constexpr const char* kWhat = "codec minmax_uint8";

  static const float* residualOf(const Encoding& encoding) {
    return encoding.hasFeedback() ? dataOf<float>(encoding.residual) : nullptr;
  }

  const std::shared_ptr<const Codec> onCuda_;
};

std::shared_ptr<const Codec> onCuda() {
#if BAGUA_WITH_CUDA
  return std::make_shared<cuda::CudaCodec>(MinMaxUInt8Codec::packedLayout(), cudaDevice());
#else
  return nullptr;
#endif
}

}  // namespace
}  // namespace bagua::minmax_uint8

BAGUA_REGISTER_CODEC({
    .name = "minmax_uint8",
    .summary = "one byte per element, on a grid from the chunk's minimum to its maximum",
    .position = 60,
    .codec = std::make_shared<bagua::minmax_uint8::MinMaxUInt8Codec>(bagua::minmax_uint8::onCuda()),
})
