// SPDX-License-Identifier: Apache-2.0
#include "kernels/loops/adam/adam.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/loops/adam/adam_loops.h"
#include "tests/support/intra_op_threads.h"

namespace bagua::adam {
namespace {

template <class T>
const ElementLoops<T>& loopsFor(const Loops& loops) {
  if constexpr (std::is_same_v<T, float>) {
    return loops.ofFloat;
  } else {
    return loops.ofDouble;
  }
}

// Numbers of many magnitudes, and what is none.
template <class T>
std::vector<T> values(int64_t count, unsigned seed) {
  std::vector<T> all(count);
  for (int64_t i = 0; i < count; ++i) {
    const auto mixed = static_cast<unsigned>(i + 1) * 2654435761U + seed * 40503U;
    all[i] = std::ldexp(static_cast<T>(mixed % 2000003) - 1000001, static_cast<int>(mixed >> 16) % 30 - 40);
  }
  if (count > 5) all[3] = std::numeric_limits<T>::infinity();
  if (count > 9) all[7] = std::numeric_limits<T>::quiet_NaN();
  return all;
}

template <class T>
std::vector<T> magnitudes(int64_t count, unsigned seed) {
  auto all = values<T>(count, seed);
  for (auto& value : all) value = std::abs(value);
  if (count > 1) all[1] = 0;
  return all;
}

template <class T>
bool haveSameBits(const std::vector<T>& a, const std::vector<T>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// An element on both sides of those that a loop is given, which it must leave alone.
constexpr int64_t kPad = 1;
constexpr int64_t kCounts[] = {0, 1, 3, 8, 17, 64, 127, 1001};

template <class T>
void expectFormula(const Loops& loops) {
  constexpr T kSize = -1.25e-3;
  constexpr T kCorrection = 0.9375;
  constexpr T kEps = 1e-8;
  for (const int64_t count : kCounts) {
    auto weights = values<T>(count + 2 * kPad, 1);
    auto momentum = values<T>(count + 2 * kPad, 2);
    const auto variance = magnitudes<T>(count + 2 * kPad, 3);
    const auto gradient = values<T>(count + 2 * kPad, 4);
    auto expected = weights;
    auto expectedMomentum = momentum;
    for (int64_t i = kPad; i < count + kPad; ++i) {
      const T denominator = std::sqrt(variance[i]) / kCorrection + kEps;
      expected[i] += kSize * gradient[i] / denominator;
      expectedMomentum[i] = gradient[i];
    }
    loopsFor<T>(loops).step(
        {weights.data(), momentum.data(), variance.data(), gradient.data(), kSize, kCorrection, kEps}, kPad,
        count + kPad);
    EXPECT_TRUE(haveSameBits(weights, expected)) << loops.name << " " << count;
    EXPECT_TRUE(haveSameBits(momentum, expectedMomentum)) << loops.name << " " << count;
  }
}

TEST(Adam, StepsHaveTheBitsOfTheFormulaOnEveryInstructionSet) {
  for (const Loops* loops : availableLoops()) {
    expectFormula<float>(*loops);
    expectFormula<double>(*loops);
  }
}

template <class T>
void expectMomentum(const Loops& loops) {
  constexpr T kDecay = 0.9;
  constexpr T kRest = 1 - 0.9;
  for (const int64_t count : kCounts) {
    auto gradient = values<T>(count + 2 * kPad, 5);
    const auto momentum = values<T>(count + 2 * kPad, 6);
    auto expected = gradient;
    for (int64_t i = kPad; i < count + kPad; ++i) {
      const T kept = kDecay * momentum[i];
      expected[i] = loops.roundsOnce ? std::fma(gradient[i], kRest, kept) : gradient[i] * kRest + kept;
    }
    loopsFor<T>(loops).makeMomentum(gradient.data() + kPad, momentum.data() + kPad, kDecay, kRest, count);
    for (int64_t i = 0; i < count + 2 * kPad; ++i) {
      EXPECT_TRUE(gradient[i] == expected[i] || (std::isnan(gradient[i]) && std::isnan(expected[i])))
          << loops.name << " " << count << " " << i << ": " << gradient[i] << " " << expected[i];
    }
  }
}

TEST(Adam, MomentaAreRoundedAsTorchDoes) {
  for (const Loops* loops : availableLoops()) {
    expectMomentum<float>(*loops);
    expectMomentum<double>(*loops);
  }
}

at::Tensor random(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
  return at::randn(sizes, at::TensorOptions().dtype(dtype));
}

TEST(Adam, TensorsTakeTheStepOfTorchsOperations) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    const at::Tensor weights = random({300, 701}, dtype), momentum = random({300, 701}, dtype);
    const at::Tensor variance = random({300, 701}, dtype).square(), gradient = random({300, 701}, dtype);
    const at::Tensor expected = weights.addcdiv(gradient, variance.sqrt().div_(0.97).add_(1e-8), -1e-3);
    step(weights, momentum, variance, gradient, {.size = -1e-3, .correction = 0.97, .eps = 1e-8});
    EXPECT_TRUE(at::equal(momentum, gradient));
    // torch's root may be off by the last bit.
    EXPECT_TRUE(at::allclose(weights, expected, 1e-6, 1e-9));
    const at::Tensor blended = momentum.mul(0.9).add_(variance, 1 - 0.9);
    makeMomentum(variance, momentum, 0.9);
    EXPECT_TRUE(at::allclose(variance, blended, 1e-6, 1e-9));
  }
}

TEST(Adam, DoesNotDependOnTheNumberOfThreads) {
  BAGUA_NEEDS_INTRA_OP_THREADS();
  const at::Tensor weights = random({200003}), variance = random({200003}).square(), gradient = random({200003});
  const at::Tensor momentum = random({200003}), sameWeights = weights.clone(), sameMomentum = momentum.clone();
  const at::Tensor blended = variance.clone(), sameBlended = variance.clone();
  const StepScales scales{.size = -1e-3, .correction = 0.97, .eps = 1e-8};
  step(weights, momentum, variance, gradient, scales);
  makeMomentum(blended, momentum, 0.9);
  const IntraOpThreads threads(5);
  step(sameWeights, sameMomentum, variance, gradient, scales);
  makeMomentum(sameBlended, sameMomentum, 0.9);
  EXPECT_TRUE(at::equal(weights, sameWeights));
  EXPECT_TRUE(at::equal(momentum, sameMomentum));
  EXPECT_TRUE(at::equal(blended, sameBlended));
}

TEST(Adam, TensorsStoredInAnotherOrderAreTaken) {
  const auto lastChannels = [](const at::Tensor& tensor) { return tensor.contiguous(at::MemoryFormat::ChannelsLast); };
  const at::Tensor gradient = random({2, 3, 4, 5}), momentum = random({2, 3, 4, 5});
  const at::Tensor expected = gradient.clone();
  makeMomentum(expected, momentum, 0.5);
  const at::Tensor reordered = lastChannels(gradient);
  makeMomentum(reordered, lastChannels(momentum), 0.5);
  EXPECT_TRUE(at::equal(reordered, expected));
}

TEST(Adam, TakesOnlyWhatIsAlike) {
  const at::Tensor tensor = random({4, 6});
  EXPECT_TRUE(areAlike({tensor, random({4, 6})}));
  EXPECT_TRUE(areAlike({tensor.t(), random({4, 6}).t()}));
  EXPECT_FALSE(areAlike({tensor, random({6, 4}).t()}));
  EXPECT_FALSE(areAlike({tensor, random({4, 7})}));
  EXPECT_FALSE(areAlike({tensor, random({24})}));
  EXPECT_FALSE(areAlike({tensor, random({4, 6}, at::kDouble)}));
  EXPECT_FALSE(areAlike({random({4, 6}, at::kHalf), random({4, 6}, at::kHalf)}));
  EXPECT_FALSE(areAlike({random({4, 8}).narrow(1, 0, 6), random({4, 8}).narrow(1, 0, 6)}));
  EXPECT_FALSE(areAlike({tensor, tensor.to_sparse()}));
  EXPECT_FALSE(areAlike({tensor, at::_neg_view(random({4, 6}))}));
  EXPECT_FALSE(areAlike({tensor, at::empty({4, 6}, at::TensorOptions().device(at::kMeta))}));
}

TEST(Adam, SaysWhatItGot) {
  try {
    makeMomentum(random({2}), random({3}, at::kDouble), 0.5);
    FAIL();
  } catch (const c10::ValueError& error) {
    const std::string message = error.what_without_backtrace();
    EXPECT_NE(message.find("Float [2] with strides [1] on cpu, Double [3]"), std::string::npos) << message;
  }
}

TEST(Adam, TellsAutogradWhatHasChanged) {
  const at::Tensor weights = random({3}), momentum = random({3});
  const auto before = weights._version(), ofMomentum = momentum._version();
  step(weights, momentum, random({3}).square(), random({3}), {.size = -1, .correction = 1, .eps = 1});
  EXPECT_GT(weights._version(), before);
  EXPECT_GT(momentum._version(), ofMomentum);
}

}  // namespace
}  // namespace bagua::adam
