// SPDX-License-Identifier: Apache-2.0
#include "kernels/codecs/block_scaled/block_scaled_cuda.h"
#include "kernels/integers.h"
#include "kernels/launch.cuh"

// A warp takes a group: its thread t holds elements t, t + 32, t + 64 and t + 96, so that a warp reads neighbours at
// once. Sums and rotations meet in the order of block_scaled_vectors.h, which gives the same bits.
namespace bagua::block_scaled::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kGroupsOfBlock = kThreads / kWarp;
constexpr int kBlocksOfMultiprocessor = 8;
constexpr unsigned kAll = 0xFFFFFFFF;

struct Warp {
  static constexpr int kWidth = kWarp;
  static constexpr int kParts = kGroup / kWidth;
  // A thread's parts are in blocks of their own.
  static constexpr int kBlocks = kParts;
  static_assert(2 * FourBits::kBlock == kWarp);

  using Floats = float;
  using Ints = int32_t;
  using Group = Floats[kParts];

  static __device__ int threadOfWarp() { return static_cast<int>(threadIdx.x % kWarp); }

  static __device__ Floats floats(float x) { return x; }
  static __device__ Ints ints(int32_t x) { return x; }
  static __device__ Ints bits(Floats x) { return __float_as_int(x); }
  static __device__ Floats asFloats(Ints x) { return __int_as_float(x); }
  static __device__ Ints toInts(uint32_t x) { return static_cast<int32_t>(x); }
  static __device__ Floats toFloats(Ints x) { return static_cast<float>(x); }

  template <class Value>
  static __device__ Value select(bool isFirst, Value yes, Value no) {
    return isFirst ? yes : no;
  }

  static __device__ uint32_t elements(int part) { return static_cast<uint32_t>(part * kWidth + threadOfWarp()); }

  static __device__ float sum(const Group& x) {
    float all = (x[0] + x[2]) + (x[1] + x[3]);
    for (int stride = kWarp / 2; stride > 0; stride /= 2) all += __shfl_xor_sync(kAll, all, stride);
    return all;
  }

  static __device__ Ints magnitudeBits(float x) { return bits(x) & 0x7FFFFFFF; }

  static __device__ float largest(const Group& x) {
    Ints top = max(max(magnitudeBits(x[0]), magnitudeBits(x[1])), max(magnitudeBits(x[2]), magnitudeBits(x[3])));
    for (int stride = kWarp / 2; stride > 0; stride /= 2) top = max(top, __shfl_xor_sync(kAll, top, stride));
    return asFloats(top);
  }

  static __device__ void hadamard(Group& x) {
    for (int stride = kParts / 2; stride > 0; stride /= 2) {
      for (int i = 0; i < kParts; ++i) {
        if ((i & stride) != 0) continue;
        const float one = x[i];
        const float other = x[i + stride];
        x[i] = one + other;
        x[i + stride] = one - other;
      }
    }
    for (int stride = kWarp / 2; stride > 0; stride /= 2) {
      const bool isSecond = (threadOfWarp() & stride) != 0;
      for (float& mine : x) {
        const float other = __shfl_xor_sync(kAll, mine, stride);
        mine = other + (isSecond ? -mine : mine);
      }
    }
  }

  static __device__ Ints signsOf(const Draw& draw, int part) {
    const int element = part * kWidth + threadOfWarp();
    return static_cast<int32_t>(static_cast<uint32_t>(draw.signs[element / 64] >> (element % 64)) << 31U);
  }

  static __device__ int blockOf(int part) { return part; }
  static __device__ int blockInGroup(int part) { return (part * kWidth + threadOfWarp()) / FourBits::kBlock; }

  static __device__ void largestOfBlocks(const Group& x, float (&tops)[kBlocks]) {
    for (int i = 0; i < kParts; ++i) {
      Ints top = magnitudeBits(x[i]);
      for (int stride = FourBits::kBlock / 2; stride > 0; stride /= 2) {
        top = max(top, __shfl_xor_sync(kAll, top, stride));
      }
      tops[i] = asFloats(top);
    }
  }

  static __device__ float largestOf(const float (&tops)[kBlocks]) { return largest(tops); }

  static __device__ uint64_t gatherScales(const uint32_t (&scales)[kBlocks]) {
    uint64_t word = 0;
    for (int i = 0; i < kBlocks; ++i) word |= static_cast<uint64_t>(scales[i]) << (6 * blockInGroup(i));
    return word | __shfl_xor_sync(kAll, word, FourBits::kBlock);
  }

  static __device__ void scatterScales(uint64_t word, uint32_t (&scales)[kBlocks]) {
    for (int i = 0; i < kBlocks; ++i) scales[i] = static_cast<uint32_t>(word >> (6 * blockInGroup(i))) & 63U;
  }

  static __device__ Floats lookUp(uint64_t table, Ints index) {
    return static_cast<float>(static_cast<uint32_t>(table >> (8 * index)) & 0xFFU);
  }

  static __device__ void storeScale(uint64_t scale, int count, uint8_t* to) {
    if (threadOfWarp() < count) to[threadOfWarp()] = static_cast<uint8_t>(scale >> (8 * threadOfWarp()));
  }

  static __device__ uint64_t loadScale(const uint8_t* from, int count) {
    uint64_t scale = 0;
    for (int i = 0; i < count; ++i) scale |= static_cast<uint64_t>(from[i]) << (8 * i);
    return scale;
  }

  template <int kBits>
  static __device__ void storeCodes(const Ints (&codes)[kParts], uint8_t* to) {
    if constexpr (kBits == 1) {
      // Byte j holds elements j + 16 k: of thread j for even k, of thread j + 16 for odd ones.
      Ints all = 0;
      const int isOdd = threadOfWarp() / 16;
      for (int i = 0; i < kParts; ++i) all |= codes[i] << (2 * i + isOdd);
      all |= __shfl_xor_sync(kAll, all, 16);
      if (isOdd == 0) to[threadOfWarp()] = static_cast<uint8_t>(all);
    } else {
      constexpr int kStep = kParts * kBits / 8;
      for (int i = 0; i < kStep; ++i) {
        Ints all = codes[i];
        for (int j = 1; j < 8 / kBits; ++j) all |= codes[i + j * kStep] << (j * kBits);
        to[i * kWidth + threadOfWarp()] = static_cast<uint8_t>(all);
      }
    }
  }

  template <int kBits>
  static __device__ void loadCodes(const uint8_t* from, Ints (&codes)[kParts]) {
    if constexpr (kBits == 1) {
      const Ints all = from[threadOfWarp() % 16];
      for (int i = 0; i < kParts; ++i) codes[i] = (all >> (2 * i + threadOfWarp() / 16)) & 1;
    } else {
      constexpr int kStep = kParts * kBits / 8;
      for (int i = 0; i < kStep; ++i) {
        const Ints all = from[i * kWidth + threadOfWarp()];
        for (int j = 0; j < 8 / kBits; ++j) codes[i + j * kStep] = (all >> (j * kBits)) & ((1 << kBits) - 1);
      }
    }
  }
};

template <class Format>
constexpr int64_t kHeaderBytes = Format::kIsRotated ? static_cast<int64_t>(sizeof(uint64_t)) : 0;

BAGUA_HOST_DEVICE int64_t groupsOf(int64_t length) { return (length + kGroup - 1) / kGroup; }

// What a block of threads works on: one row, which it shares with the other blocks of that row.
struct Share {
  int64_t row;
  unsigned block;
  unsigned blocks;

  explicit __device__ Share(unsigned blocksOfRow)
      : row(blockIdx.x / blocksOfRow), block(blockIdx.x % blocksOfRow), blocks(blocksOfRow) {}

  // Calls f(group) for this warp's groups of a chunk of `length` elements.
  template <class F>
  __device__ void forGroups(int64_t length, const F& f) const {
    const int64_t groups = groupsOf(length);
    const int64_t first = static_cast<int64_t>(block) * kGroupsOfBlock + threadIdx.x / kWarp;
    for (int64_t group = first; group < groups; group += static_cast<int64_t>(blocks) * kGroupsOfBlock) f(group);
  }

  // Calls f(byte) for this thread's bytes of [begin, end).
  template <class F>
  __device__ void forBytes(int64_t begin, int64_t end, const F& f) const {
    const int64_t first = begin + static_cast<int64_t>(block) * kThreads + threadIdx.x;
    for (int64_t byte = first; byte < end; byte += static_cast<int64_t>(blocks) * kThreads) f(byte);
  }
};

// The residual to be coded with an element, which lies in source.residual afterwards.
template <class Element>
__device__ float residualOf(const Source<Element>& source, int64_t element, bool wasLost) {
  if (!wasLost) return source.residual[element];
  return source.residual[element] = source.nextResidual[element];
}

template <class Format, class Element>
__device__ void keepRest(const Source<Element>& source, int64_t first, int64_t end,
                         const typename ElementTraits<Element>::Compute (&h)[Warp::kParts], const Coded<Warp>& coded,
                         const Draw& draw) {
  using Traits = ElementTraits<Element>;
  using T = typename Traits::Compute;
  const bool isNan = Format::isNan(coded.scale);
  Warp::Group decoded;
  if (!isNan) Format::template values<Warp>(coded, draw, decoded);
  for (int i = 0; i < Warp::kParts; ++i) {
    const int64_t element = first + Warp::elements(i);
    if (element >= end) continue;
    source.nextResidual[element] =
        isNan ? source.residual[element] : restOf(h[i], Traits::load(toElement<Element>(static_cast<T>(decoded[i]))));
  }
}

// Elements are counted in all values, so that the pointers of the source stay where arguments are, and take no
// registers.
template <class Format, class Element, bool kIsStochastic>
__global__ void __launch_bounds__(kThreads)
    encodeKernel(Source<Element> source, bool areParts, Cut cut, PackedRows<uint8_t> rows, unsigned blocksOfRow) {
  using Traits = ElementTraits<Element>;
  using T = typename Traits::Compute;
  const Share share(blocksOfRow);
  const int64_t begin = cut.begin(share.row);
  const int64_t length = cut.size(share.row);
  const uint64_t key = areParts ? keyOfPart(source.key, begin) : source.key;
  uint8_t* packed = rows.row(share.row);
  const bool wasLost = source.wasLost != nullptr && *source.wasLost;
  share.forGroups(length, [&](int64_t group) {
    const Draw draw(key, group);
    const int64_t first = begin + group * kGroup;
    T h[Warp::kParts];
    Warp::Group x;
    for (int i = 0; i < Warp::kParts; ++i) {
      const int64_t element = first + Warp::elements(i);
      const bool isThere = element < begin + length;
      h[i] = isThere ? Traits::load(source.values[element]) : T{0};
      if (source.residual != nullptr && isThere) h[i] += static_cast<T>(residualOf(source, element, wasLost));
      x[i] = toCoded(h[i]);
    }
    const Coded<Warp> coded = Format::template code<Warp, kIsStochastic>(x, draw);
    writeGroup<Format>(coded, packed + kHeaderBytes<Format> + group * kBytesOfGroup<Format>);
    if (source.residual != nullptr) keepRest<Format>(source, first, begin + length, h, coded, draw);
  });
  share.forBytes(0, kHeaderBytes<Format>,
                 [&](int64_t byte) { packed[byte] = static_cast<uint8_t>(key >> (8 * byte)); });
  share.forBytes(kHeaderBytes<Format> + groupsOf(length) * kBytesOfGroup<Format>, rows.rowBytes,
                 [&](int64_t byte) { packed[byte] = 0; });
}

// Calls take(part, element of the chunk, value) for this thread's elements of a group, with values as elements hold
// them.
template <class Format, class Element, class Take>
__device__ void decodeGroup(const uint8_t* packed, int64_t length, int64_t group, const Take& take) {
  using Traits = ElementTraits<Element>;
  const uint64_t key = kHeaderBytes<Format> == 0 ? 0 : Warp::loadScale(packed, kHeaderBytes<Format>);
  const Coded<Warp> coded = readGroup<Format, Warp>(packed + kHeaderBytes<Format> + group * kBytesOfGroup<Format>);
  const bool isNan = Format::isNan(coded.scale);
  Warp::Group x;
  if (!isNan) Format::template values<Warp>(coded, Draw(key, group), x);
  for (int i = 0; i < Warp::kParts; ++i) {
    const int64_t element = group * kGroup + Warp::elements(i);
    if (element >= length) continue;
    take(i, element, isNan ? Traits::nan() : toElement<Element>(static_cast<typename Traits::Compute>(x[i])));
  }
}

template <class Format, class Element>
__global__ void __launch_bounds__(kThreads)
    decodeKernel(PackedRows<const uint8_t> rows, Cut cut, Element* __restrict__ values, unsigned blocksOfRow) {
  const Share share(blocksOfRow);
  const uint8_t* packed = rows.row(share.row);
  Element* chunk = values + cut.begin(share.row);
  const int64_t length = cut.size(share.row);
  share.forGroups(length, [&](int64_t group) {
    decodeGroup<Format, Element>(packed, length, group,
                                 [&](int /*part*/, int64_t element, Element value) { chunk[element] = value; });
  });
}

// A group's sums stay in the registers of its warp.
template <class Format, class Element>
__global__ void __launch_bounds__(kThreads)
    meanKernel(PackedRows<const uint8_t> rows, int64_t copies, int64_t length,
               typename ElementTraits<Element>::Compute divisor, Element* __restrict__ mean, unsigned blocks) {
  using Traits = ElementTraits<Element>;
  const Share share(blocks);
  share.forGroups(length, [&](int64_t group) {
    typename Traits::Compute sums[Warp::kParts] = {};
    for (int64_t copy = 0; copy < copies; ++copy) {
      decodeGroup<Format, Element>(rows.row(copy), length, group, [&](int part, int64_t /*element*/, Element value) {
        sums[part] += Traits::load(value);
      });
    }
    for (int i = 0; i < Warp::kParts; ++i) {
      const int64_t element = group * kGroup + Warp::elements(i);
      if (element < length) mean[element] = Traits::store(sums[i] / divisor);
    }
  });
}

// One for each row at least: an empty chunk has a header.
unsigned blocksOfRow(int64_t length, int64_t rows, const CudaLaunch& launch) {
  const int64_t wanted = (groupsOf(length) + kGroupsOfBlock - 1) / kGroupsOfBlock;
  const int64_t most = (static_cast<int64_t>(launch.multiprocessors) * kBlocksOfMultiprocessor + rows - 1) / rows;
  return static_cast<unsigned>(wanted < 1 ? 1 : (wanted < most ? wanted : most));
}

template <class Format, class Element>
cudaError_t encode(const Source<Element>& source, bool areParts, const Cut& cut, const PackedRows<uint8_t>& rows,
                   const CudaLaunch& launch) {
  if (cut.chunks == 0) return cudaSuccess;
  const unsigned blocks = blocksOfRow(cut.stride, cut.chunks, launch);
  const auto kernel = source.isStochastic ? encodeKernel<Format, Element, true> : encodeKernel<Format, Element, false>;
  launchKernel(kernel, blocks * static_cast<unsigned>(cut.chunks), kThreads, launch.stream, source, areParts, cut, rows,
               blocks);
  return cudaGetLastError();
}

template <class Format, class Element>
cudaError_t decode(const PackedRows<const uint8_t>& rows, const Cut& cut, Element* values, const CudaLaunch& launch) {
  if (cut.length == 0) return cudaSuccess;
  const unsigned blocks = blocksOfRow(cut.stride, cut.chunks, launch);
  launchKernel(decodeKernel<Format, Element>, blocks * static_cast<unsigned>(cut.chunks), kThreads, launch.stream, rows,
               cut, values, blocks);
  return cudaGetLastError();
}

template <class Format, class Element>
cudaError_t mean(const PackedRows<const uint8_t>& rows, int64_t copies, int64_t length,
                 typename ElementTraits<Element>::Compute divisor, Element* mean, const CudaLaunch& launch) {
  if (length == 0) return cudaSuccess;
  const unsigned blocks = blocksOfRow(length, 1, launch);
  launchKernel(meanKernel<Format, Element>, blocks, kThreads, launch.stream, rows, copies, length, divisor, mean,
               blocks);
  return cudaGetLastError();
}

template <class Format, class Element>
constexpr ElementKernels<Element> elementKernels() {
  return {encode<Format, Element>, decode<Format, Element>, mean<Format, Element>};
}

}  // namespace

template <class Format>
const FormatKernels& kernelsOf() {
  static constexpr FormatKernels kKernels = {elementKernels<Format, float>(), elementKernels<Format, double>(),
                                             elementKernels<Format, HalfBits>(),
                                             elementKernels<Format, BFloat16Bits>()};
  return kKernels;
}

template const FormatKernels& kernelsOf<EightBits>();
template const FormatKernels& kernelsOf<FourBits>();
template const FormatKernels& kernelsOf<TwoBits>();
template const FormatKernels& kernelsOf<OneBit>();

}  // namespace bagua::block_scaled::cuda
