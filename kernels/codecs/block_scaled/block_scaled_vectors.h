// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "kernels/codecs/block_scaled/block_scaled_formats.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// A group of numbers in the registers of a CPU: the Machine of block_scaled_formats.h. With a width of one it is plain
// C++; with 8 or 16 it uses the compiler's vectors. Only for the sources of one instruction set each: `Isa` is a type
// of the source's own, so that the linker does not take the code of one for all.
namespace bagua::block_scaled {

template <int kWidth>
struct Vectors {
  using Floats __attribute__((vector_size(kWidth * 4))) = float;
  using Ints __attribute__((vector_size(kWidth * 4))) = int32_t;
  using UInts __attribute__((vector_size(kWidth * 4))) = uint32_t;
};

template <>
struct Vectors<1> {
  using Floats = float;
  using Ints = int32_t;
  using UInts = uint32_t;
};

template <class Isa>
struct VectorMachine {
  static constexpr int kWidth = Isa::kWidth;
  static constexpr int kParts = kGroup / kWidth;
  static constexpr int kBlocks = FourBits::kBlocks;
  static constexpr bool kIsVector = kWidth > 1;

  using Floats = Vectors<kWidth>::Floats;
  using Ints = Vectors<kWidth>::Ints;
  using UInts = Vectors<kWidth>::UInts;
  using Group = Floats[kParts];

  static BAGUA_GROUP Floats floats(float x) { return Floats{} + x; }
  static BAGUA_GROUP Ints ints(int32_t x) { return Ints{} + x; }
  static BAGUA_GROUP Ints bits(Floats x) { return bitCast<Ints>(x); }
  static BAGUA_GROUP Floats asFloats(Ints x) { return bitCast<Floats>(x); }
  static BAGUA_GROUP Ints toInts(UInts x) { return bitCast<Ints>(x); }
  static BAGUA_GROUP Floats toFloats(Ints x) {
    if constexpr (kIsVector) {
      return __builtin_convertvector(x, Floats);
    } else {
      return static_cast<float>(x);
    }
  }

  template <class Mask, class Value>
  static BAGUA_GROUP Value select(Mask mask, Value yes, Value no) {
    return mask ? yes : no;
  }

  // The numbers of a part's elements in the group.
  static BAGUA_GROUP UInts elements(int part) { return elementNumbers() + static_cast<uint32_t>(part * kWidth); }

  // Both move each register by itself. GCC copies a whole group by an instruction that takes longer to start than a
  // group to code.
  static BAGUA_GROUP void load(const float* from, Group& x) {
#pragma GCC unroll 128
    for (int i = 0; i < kParts; ++i) memcpy(&x[i], from + int64_t{i} * kWidth, sizeof(x[i]));
  }
  static BAGUA_GROUP void store(const Group& x, float* to) {
#pragma GCC unroll 128
    for (int i = 0; i < kParts; ++i) memcpy(to + int64_t{i} * kWidth, &x[i], sizeof(x[i]));
  }

  // Sums and rotations fold the group in halves, down to neighbours, so that they do not depend on the width.
  static BAGUA_GROUP float sum(const Group& x) {
    Group half;
    memcpy(&half, &x, sizeof(x));
    for (int parts = kParts / 2; parts > 0; parts /= 2) {
      for (int i = 0; i < parts; ++i) half[i] += half[i + parts];
    }
    return folded(half[0], [](Floats a, Floats b) { return a + b; });
  }

  // As bits, in whose order an infinity is beyond the numbers, and a NaN beyond it.
  static BAGUA_GROUP float largest(const Group& x) {
    Ints top = bits(x[0]) & 0x7FFFFFFF;
    for (int i = 1; i < kParts; ++i) top = larger(top, bits(x[i]) & 0x7FFFFFFF);
    return folded(asFloats(top), largerMagnitude);
  }

  static BAGUA_GROUP void hadamard(Group& x) {
    for (int stride = kParts / 2; stride > 0; stride /= 2) {
      for (int i = 0; i < kParts; ++i) {
        if ((i & stride) != 0) continue;
        const Floats one = x[i];
        const Floats other = x[i + stride];
        x[i] = one + other;
        x[i + stride] = one - other;
      }
    }
    if constexpr (kWidth > 8) butterflies<8>(x);
    if constexpr (kWidth > 4) {
      butterflies<4>(x);
      butterflies<2>(x);
      butterflies<1>(x);
    }
  }

  // The bits of signs for a part, for an exclusive or.
  static BAGUA_GROUP Ints signsOf(const Draw& draw, int part) {
    const int first = part * kWidth;
    const auto word = static_cast<uint32_t>(draw.signs[first / 64] >> static_cast<unsigned>(first % 64));
    return toInts(((UInts{} + word) >> elementNumbers()) << 31U);
  }

  // Blocks of FourBits.
  static BAGUA_GROUP int blockOf(int part) { return part * kWidth / FourBits::kBlock; }

  static BAGUA_GROUP void largestOfBlocks(const Group& x, float (&tops)[kBlocks]) {
    constexpr int kPartsOfBlock = FourBits::kBlock / kWidth;
    for (int block = 0; block < kBlocks; ++block) {
      const int first = block * kPartsOfBlock;
      Ints top = bits(x[first]) & 0x7FFFFFFF;
      for (int i = 1; i < kPartsOfBlock; ++i) top = larger(top, bits(x[first + i]) & 0x7FFFFFFF);
      tops[block] = folded(asFloats(top), largerMagnitude);
    }
  }

  static BAGUA_GROUP float largestOf(const float (&tops)[kBlocks]) {
    uint32_t top = 0;
    for (const float candidate : tops) {
      const auto other = bitCast<uint32_t>(candidate);
      top = other > top ? other : top;
    }
    return bitCast<float>(top);
  }

  static BAGUA_GROUP uint64_t gatherScales(const uint32_t (&scales)[kBlocks]) {
    uint64_t word = 0;
    for (int i = 0; i < kBlocks; ++i) word |= static_cast<uint64_t>(scales[i]) << static_cast<unsigned>(6 * i);
    return word;
  }

  static BAGUA_GROUP void scatterScales(uint64_t word, uint32_t (&scales)[kBlocks]) {
    for (int i = 0; i < kBlocks; ++i) scales[i] = static_cast<uint32_t>(word >> static_cast<unsigned>(6 * i)) & 63U;
  }

  // Of a table of eight bytes.
  static BAGUA_GROUP Floats lookUp(uint64_t table, Ints index) {
    if constexpr (kIsVector) {
      return Isa::lookUp(table, index);
    } else {
      return static_cast<float>((table >> static_cast<unsigned>(8 * index)) & 0xFFU);
    }
  }

  static BAGUA_GROUP void storeScale(uint64_t scale, int count, uint8_t* to) {
    memcpy(to, &scale, static_cast<size_t>(count));
  }
  static BAGUA_GROUP uint64_t loadScale(const uint8_t* from, int count) {
    uint64_t scale = 0;
    memcpy(&scale, from, static_cast<size_t>(count));
    return scale;
  }

  template <int kBits>
  static BAGUA_GROUP void storeCodes(const Ints (&codes)[kParts], uint8_t* to) {
    constexpr int kStep = kParts * kBits / 8;
    static_assert(kStep > 0);
    Ints all[kStep];
    for (int i = 0; i < kStep; ++i) {
      all[i] = codes[i];
      for (int j = 1; j < 8 / kBits; ++j) all[i] |= codes[i + j * kStep] << (j * kBits);
    }
    if constexpr (kStep % 4 == 0 && requires { Isa::storeLowestBytesOfFour(all, to); }) {
      for (int i = 0; i < kStep; i += 4) Isa::storeLowestBytesOfFour(all + i, to + int64_t{i} * kWidth);
    } else {
      for (int i = 0; i < kStep; ++i) storeLowestBytes(all[i], to + int64_t{i} * kWidth);
    }
  }

  template <int kBits>
  static BAGUA_GROUP void loadCodes(const uint8_t* from, Ints (&codes)[kParts]) {
    constexpr int kStep = kParts * kBits / 8;
    for (int i = 0; i < kStep; ++i) {
      const Ints all = loadBytes(from + int64_t{i} * kWidth);
      for (int j = 0; j < 8 / kBits; ++j) codes[i + j * kStep] = (all >> (j * kBits)) & ((1 << kBits) - 1);
    }
  }

 private:
  static BAGUA_GROUP UInts elementNumbers() {
    if constexpr (kIsVector) {
      UInts numbers;
      for (int i = 0; i < kWidth; ++i) numbers[i] = static_cast<uint32_t>(i);
      return numbers;
    } else {
      return 0;
    }
  }

  static BAGUA_GROUP Ints larger(Ints a, Ints b) {
    if constexpr (kIsVector) {
      return Isa::larger(a, b);
    } else {
      return a > b ? a : b;
    }
  }
  static BAGUA_GROUP Floats largerMagnitude(Floats a, Floats b) { return asFloats(larger(bits(a), bits(b))); }

  static BAGUA_GROUP void storeLowestBytes(Ints x, uint8_t* to) {
    if constexpr (kIsVector) {
      Isa::storeLowestBytes(x, to);
    } else {
      *to = static_cast<uint8_t>(x);
    }
  }

  static BAGUA_GROUP Ints loadBytes(const uint8_t* from) {
    if constexpr (kIsVector) {
      return Isa::loadBytes(from);
    } else {
      return *from;
    }
  }

  // Element i gets element i ^ kStride.
  template <int kStride, int... kElement>
  static BAGUA_GROUP Floats exchanged(Floats x, std::integer_sequence<int, kElement...> /*elements*/) {
    return __builtin_shufflevector(x, x, (kElement ^ kStride)...);
  }
  template <int kStride>
  static BAGUA_GROUP Floats exchanged(Floats x) {
    return exchanged<kStride>(x, std::make_integer_sequence<int, kWidth>());
  }

  template <class Join>
  static BAGUA_GROUP float folded(Floats x, const Join& join) {
    if constexpr (kIsVector) {
      if constexpr (kWidth > 8) x = join(x, exchanged<8>(x));
      x = join(x, exchanged<4>(x));
      x = join(x, exchanged<2>(x));
      x = join(x, exchanged<1>(x));
      return x[0];
    } else {
      return x;
    }
  }

  // Of two elements kStride apart, the first gets the sum and the other the difference.
  template <int kStride>
  static BAGUA_GROUP void butterflies(Group& x) {
    const Ints isSecond =
        toInts((elementNumbers() & static_cast<uint32_t>(kStride)) != 0U ? UInts{} + kSignBit : UInts{});
    for (int i = 0; i < kParts; ++i) x[i] = exchanged<kStride>(x[i]) + asFloats(bits(x[i]) ^ isSecond);
  }
};

}  // namespace bagua::block_scaled
