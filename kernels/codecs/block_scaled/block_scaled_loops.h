// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/codecs/block_scaled/block_scaled_source.h"
#include "kernels/codecs/block_scaled/block_scaled_vectors.h"
#include "kernels/codecs/block_scaled/per_element.h"

// The block codecs on CPU memory: loops over groups, compiled once for each instruction set by the sources beside
// this file. No pointer needs an alignment beyond its element's.
namespace bagua::block_scaled {

// Of elements [begin, end) of a chunk; begin is a multiple of a group. `bytes` are those of its first group.
template <class Element>
struct ElementLoops {
  using T = ElementTraits<Element>::Compute;

  void (*encode)(const Source<Element>& source, int64_t begin, int64_t end, uint8_t* bytes);
  void (*decode)(const uint8_t* bytes, uint64_t key, int64_t begin, int64_t end, Element* values);
  // To sums of the elements from `begin` on.
  void (*add)(const uint8_t* bytes, uint64_t key, int64_t begin, int64_t end, T* sums);
  // Sums divided and rounded.
  void (*divide)(const T* sums, T divisor, int64_t count, Element* values);
};

using FormatLoops = PerElement<ElementLoops>;

struct Loops {
  FormatLoops eightBits;
  FormatLoops fourBits;
  FormatLoops twoBits;
  FormatLoops oneBit;
};

const Loops& scalarLoops();
#if defined(__x86_64__)
const Loops& avx2Loops();
const Loops& avx512Loops();
#endif

template <class Isa, class Format, class Element>
struct LoopsOver {
  using Machine = VectorMachine<Isa>;
  using Traits = ElementTraits<Element>;
  using T = Traits::Compute;
  static constexpr int64_t kBytes = kBytesOfGroup<Format>;

  struct alignas(64) Numbers {
    T x[kGroup];
  };

  // `count` elements of one group, the compiler's constant where it is full.
  template <class F>
  static BAGUA_GROUP void withCount(int64_t count, const F& f) {
    if (count == kGroup) {
      f(std::integral_constant<int64_t, kGroup>());
    } else {
      f(count);
    }
  }

  // Halves are converted a group at a time, as the instruction set can.
  static BAGUA_GROUP void load(const Element* from, int64_t count, T* to) {
    if constexpr (std::is_same_v<Element, HalfBits>) {
      Isa::loadHalves(from, count, to);
    } else {
      for (int64_t i = 0; i < count; ++i) to[i] = Traits::load(from[i]);
    }
  }

  // Stores numbers as they are, or bounded to what an element holds, as decode() does.
  template <bool kIsBounded = true>
  static BAGUA_GROUP void store(const T* from, int64_t count, Element* to) {
    if constexpr (std::is_same_v<Element, HalfBits>) {
      alignas(64) float bounded[kGroup];
      for (int64_t i = 0; i < count; ++i) bounded[i] = kIsBounded ? boundedToHalf(from[i]) : from[i];
      Isa::storeHalves(bounded, count, to);
    } else {
      for (int64_t i = 0; i < count; ++i) to[i] = toElement<Element>(from[i]);
    }
  }

  // What decode() makes of the number, as a number again.
  static BAGUA_GROUP void round(T* x, int64_t count) {
    if constexpr (!std::is_same_v<Element, T>) {
      Element elements[kGroup];
      store(x, count, elements);
      load(elements, count, x);
    }
  }

  // h of a group, with zeros where it has no elements.
  static BAGUA_GROUP void sumsOf(const Source<Element>& source, int64_t first, int64_t count, Numbers& h) {
    if (count < kGroup) memset(h.x, 0, sizeof(h.x));
    withCount(count, [&](auto n) {
      const Element* values = source.values + first;
      if (source.residual == nullptr) return load(values, n, h.x);
      const float* residual = source.residual + first;
      if constexpr (std::is_same_v<Element, T>) {
        for (int64_t i = 0; i < n; ++i) h.x[i] = values[i] + static_cast<T>(residual[i]);
        return;
      }
      load(values, n, h.x);
      for (int64_t i = 0; i < n; ++i) h.x[i] += static_cast<T>(residual[i]);
    });
  }

  static BAGUA_GROUP void toGroup(const Numbers& h, typename Machine::Group& group) {
    if constexpr (std::is_same_v<T, double>) {
      alignas(64) float narrow[kGroup];
      for (int i = 0; i < kGroup; ++i) narrow[i] = toCoded(h.x[i]);
      Machine::load(narrow, group);
    } else {
      Machine::load(h.x, group);
    }
  }

  // Loads what is coded of a group. h stays empty where nobody needs it: the copy takes longer than the coding.
  static BAGUA_GROUP void groupOf(const Source<Element>& source, int64_t first, int64_t count, Numbers& h,
                                  typename Machine::Group& group) {
    if constexpr (std::is_same_v<Element, float>) {
      if (count == kGroup && source.residual == nullptr) return Machine::load(source.values + first, group);
    }
    sumsOf(source, first, count, h);
    toGroup(h, group);
  }

  static BAGUA_GROUP void fromGroup(const typename Machine::Group& group, Numbers& values) {
    if constexpr (std::is_same_v<T, double>) {
      alignas(64) float narrow[kGroup];
      Machine::store(group, narrow);
      for (int i = 0; i < kGroup; ++i) values.x[i] = narrow[i];
    } else {
      Machine::store(group, values.x);
    }
  }

  static BAGUA_GROUP void keepRest(const Source<Element>& source, int64_t first, int64_t count, const Numbers& h,
                                   const Coded<Machine>& coded, const Draw& draw) {
    float* next = source.nextResidual + first;
    if (Format::isNan(coded.scale)) {
      if (next != source.residual + first) {
        memmove(next, source.residual + first, static_cast<size_t>(count) * sizeof(float));
      }
      return;
    }
    typename Machine::Group group;
    Format::template values<Machine>(coded, draw, group);
    Numbers decoded;
    fromGroup(group, decoded);
    withCount(count, [&](auto n) {
      round(decoded.x, n);
      for (int64_t i = 0; i < n; ++i) next[i] = restOf(h.x[i], decoded.x[i]);
    });
  }

  template <bool kIsStochastic>
  static void encodeGroups(const Source<Element>& source, int64_t begin, int64_t end, uint8_t* bytes) {
    for (int64_t first = begin; first < end; first += kGroup, bytes += kBytes) {
      const int64_t count = end - first < kGroup ? end - first : kGroup;
      const Draw draw(source.key, first / kGroup);
      Numbers h;
      typename Machine::Group group;
      groupOf(source, first, count, h, group);
      const Coded<Machine> coded = Format::template code<Machine, kIsStochastic>(group, draw);
      writeGroup<Format>(coded, bytes);
      if (source.nextResidual != nullptr) keepRest(source, first, count, h, coded, draw);
    }
  }

  // The whole group at `first`, and its scale.
  static BAGUA_GROUP void wholeGroupOf(const Source<Element>& source, int64_t first, typename Machine::Group& group) {
    Numbers h;
    groupOf(source, first, kGroup, h, group);
  }
  static BAGUA_GROUP auto scaleAt(const Source<Element>& source, int64_t first) {
    typename Machine::Group group;
    wholeGroupOf(source, first, group);
    return Format::template scaleOf<Machine>(group);
  }

  // Whole groups without feedback. Each is read twice, so that its scale is made while the one before it is coded.
  template <bool kIsStochastic>
  static void encodeWithScaleAhead(const Element* values, uint64_t key, int64_t begin, int64_t end, uint8_t* bytes) {
    if (begin == end) return;
    // The compiler sees that there is no residual.
    const Source<Element> source{.values = values, .isStochastic = kIsStochastic, .key = key};
    auto scale = scaleAt(source, begin);
    for (int64_t first = begin; first < end; first += kGroup, bytes += kBytes) {
      const auto next = scaleAt(source, first + kGroup < end ? first + kGroup : first);
      typename Machine::Group group;
      wholeGroupOf(source, first, group);
      const Draw draw(source.key, first / kGroup);
      writeGroup<Format>(Format::template code<Machine, kIsStochastic>(group, scale, draw), bytes);
      scale = next;
    }
  }

  template <bool kIsStochastic>
  static void encodeAs(const Source<Element>& source, int64_t begin, int64_t end, uint8_t* bytes) {
    if constexpr (Machine::kIsVector && requires { typename Format::Scale; }) {
      if (source.nextResidual == nullptr) {
        const int64_t whole = (end - begin) / kGroup;
        encodeWithScaleAhead<kIsStochastic>(source.values, source.key, begin, begin + whole * kGroup, bytes);
        begin += whole * kGroup;
        bytes += whole * kBytes;
      }
    }
    encodeGroups<kIsStochastic>(source, begin, end, bytes);
  }

  static void encode(const Source<Element>& source, int64_t begin, int64_t end, uint8_t* bytes) {
    if (source.isStochastic) {
      encodeAs<true>(source, begin, end, bytes);
    } else {
      encodeAs<false>(source, begin, end, bytes);
    }
  }

  // Calls visit(first, count, coded, draw) for every group.
  template <class Visit>
  static BAGUA_GROUP void forCoded(const uint8_t* bytes, uint64_t key, int64_t begin, int64_t end, const Visit& visit) {
    for (int64_t first = begin; first < end; first += kGroup, bytes += kBytes) {
      const Coded<Machine> coded = readGroup<Format, Machine>(bytes);
      const Draw draw(key, first / kGroup);
      withCount(end - first < kGroup ? end - first : kGroup, [&](auto count) { visit(first, count, coded, draw); });
    }
  }

  // Those of a NaN group are NaN.
  static BAGUA_GROUP void numbersOf(const Coded<Machine>& coded, const Draw& draw, Numbers& numbers) {
    if (Format::isNan(coded.scale)) {
      for (T& x : numbers.x) x = ElementTraits<T>::nan();
      return;
    }
    typename Machine::Group group;
    Format::template values<Machine>(coded, draw, group);
    fromGroup(group, numbers);
  }

  static void decode(const uint8_t* bytes, uint64_t key, int64_t begin, int64_t end, Element* values) {
    forCoded(bytes, key, begin, end, [&](int64_t first, auto count, const Coded<Machine>& coded, const Draw& draw) {
      // A whole group goes from the registers to where it belongs.
      if constexpr (std::is_same_v<Element, float>) {
        if (count == kGroup && !Format::isNan(coded.scale)) {
          typename Machine::Group group;
          Format::template values<Machine>(coded, draw, group);
          return Machine::store(group, values + first);
        }
      }
      Numbers numbers;
      numbersOf(coded, draw, numbers);
      store(numbers.x, count, values + first);
    });
  }

  static void add(const uint8_t* bytes, uint64_t key, int64_t begin, int64_t end, T* sums) {
    forCoded(bytes, key, begin, end, [&](int64_t first, auto count, const Coded<Machine>& coded, const Draw& draw) {
      Numbers numbers;
      numbersOf(coded, draw, numbers);
      round(numbers.x, count);
      T* to = sums + (first - begin);
      for (int64_t i = 0; i < count; ++i) to[i] += numbers.x[i];
    });
  }

  static void divide(const T* sums, T divisor, int64_t count, Element* values) {
    for (int64_t first = 0; first < count; first += kGroup) {
      withCount(count - first < kGroup ? count - first : kGroup, [&](auto n) {
        T means[kGroup];
        for (int64_t i = 0; i < n; ++i) means[i] = sums[first + i] / divisor;
        store<false>(means, n, values + first);
      });
    }
  }

  static constexpr ElementLoops<Element> loops() { return {encode, decode, add, divide}; }
};

template <class Isa, class Format>
constexpr FormatLoops formatLoops() {
  return {LoopsOver<Isa, Format, float>::loops(), LoopsOver<Isa, Format, double>::loops(),
          LoopsOver<Isa, Format, HalfBits>::loops(), LoopsOver<Isa, Format, BFloat16Bits>::loops()};
}

template <class Isa>
constexpr Loops loopsOf() {
  return {formatLoops<Isa, EightBits>(), formatLoops<Isa, FourBits>(), formatLoops<Isa, TwoBits>(),
          formatLoops<Isa, OneBit>()};
}

}  // namespace bagua::block_scaled
