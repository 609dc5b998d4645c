// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

// Compiled once for each instruction set, by the sources beside it. `Isa` is a type of the source's own: without it the
// linker would take the loops of one source for all.
namespace bagua::adam {

template <class T>
struct StepArguments {
  T* weights;
  T* momentum;
  const T* variance;
  const T* gradient;
  T size, correction, eps;
};

template <class T>
struct ElementLoops {
  void (*step)(const StepArguments<T>&, int64_t begin, int64_t end);
  void (*makeMomentum)(T* gradient, const T* momentum, T decay, T rest, int64_t count);
};

struct Loops {
  const char* name;
  // A product and a sum, where the momentum is made.
  bool roundsOnce;
  ElementLoops<float> ofFloat;
  ElementLoops<double> ofDouble;
};

const Loops& scalarLoops();
#if defined(__x86_64__)
const Loops& avx2Loops();
const Loops& avx512Loops();
#endif
// What this machine can run, the fastest last.
const std::vector<const Loops*>& availableLoops();

template <class Isa, class T>
void stepLoop(const StepArguments<T>& arguments, int64_t begin, int64_t end) {
  const auto [weights, momentum, variance, gradient, size, correction, eps] = arguments;
  T* __restrict const x = weights;
  T* __restrict const m = momentum;
  const T* __restrict const v = variance;
  const T* __restrict const g = gradient;
  for (int64_t i = begin; i < end; ++i) {
    m[i] = g[i];
    x[i] += size * g[i] / (std::sqrt(v[i]) / correction + eps);
  }
}

template <class Isa, class T>
void momentumLoop(T* gradient, const T* momentum, T decay, T rest, int64_t count) {
  T* __restrict const g = gradient;
  const T* __restrict const m = momentum;
  for (int64_t i = 0; i < count; ++i) {
    // torch's add with a factor rounds once where the processor can.
    if constexpr (Isa::kRoundsOnce) {
      g[i] = std::fma(g[i], rest, m[i] * decay);
    } else {
      g[i] = g[i] * rest + m[i] * decay;
    }
  }
}

template <class Isa>
constexpr Loops loopsOf(const char* name) {
  return {name,
          Isa::kRoundsOnce,
          {stepLoop<Isa, float>, momentumLoop<Isa, float>},
          {stepLoop<Isa, double>, momentumLoop<Isa, double>}};
}

}  // namespace bagua::adam
