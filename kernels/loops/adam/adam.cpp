// SPDX-License-Identifier: Apache-2.0
#include "kernels/loops/adam/adam.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <string>
#include <type_traits>

#include "kernels/device_ways.h"
#include "kernels/loops/adam/adam_loops.h"
#include "kernels/share_out.h"

namespace bagua::adam {
namespace {

// Elements for which another thread is worth its start.
constexpr int64_t kGrain = int64_t{32} << 10;

template <class T>
const ElementLoops<T>& fastest() {
  const Loops& loops = *availableLoops().back();
  if constexpr (std::is_same_v<T, float>) {
    return loops.ofFloat;
  } else {
    return loops.ofDouble;
  }
}

void check(const std::vector<at::Tensor>& tensors, const char* operation) {
  if (areAlike(tensors)) return;
  std::string got;
  for (const auto& tensor : tensors) {
    got += c10::str(got.empty() ? "" : ", ", tensor.scalar_type(), " ", tensor.sizes(), " with strides ",
                    tensor.strides(), " on ", tensor.device());
  }
  TORCH_CHECK_VALUE(false, "adam ", operation,
                    " expects float32 or float64 tensors on the CPU of one type and shape, stored alike and without "
                    "gaps, got ",
                    got);
}

// As torch's own operations do: what autograd has saved of a tensor must not pass for what it is now.
void noteChange(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

template <class T>
void stepOf(const at::Tensor& weights, const at::Tensor& momentum, const at::Tensor& variance,
            const at::Tensor& gradient, const StepScales& scales) {
  const StepArguments<T> arguments{.weights = weights.mutable_data_ptr<T>(),
                                   .momentum = momentum.mutable_data_ptr<T>(),
                                   .variance = variance.const_data_ptr<T>(),
                                   .gradient = gradient.const_data_ptr<T>(),
                                   .size = static_cast<T>(scales.size),
                                   .correction = static_cast<T>(scales.correction),
                                   .eps = static_cast<T>(scales.eps)};
  shareOut(weights.numel(), kGrain, [&](int64_t begin, int64_t end) { fastest<T>().step(arguments, begin, end); });
}

template <class T>
void makeMomentumOf(const at::Tensor& gradient, const at::Tensor& momentum, double decay) {
  T* const g = gradient.mutable_data_ptr<T>();
  const T* const m = momentum.const_data_ptr<T>();
  shareOut(gradient.numel(), kGrain, [&](int64_t begin, int64_t end) {
    fastest<T>().makeMomentum(g + begin, m + begin, static_cast<T>(decay), static_cast<T>(1 - decay), end - begin);
  });
}

}  // namespace

const std::vector<const Loops*>& availableLoops() {
  static const std::vector<const Loops*> kAvailable = [] {
    std::vector<const Loops*> available = {&scalarLoops()};
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (avx2) available.push_back(&avx2Loops());
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl")) {
      available.push_back(&avx512Loops());
    }
#endif
    return available;
  }();
  return kAvailable;
}

bool areAlike(const std::vector<at::Tensor>& tensors) {
  const at::Tensor& first = tensors.at(0);
  if (first.scalar_type() != at::kFloat && first.scalar_type() != at::kDouble) return false;
  return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    // What stands for other data, or has none, is left to torch.
    const bool isPlain = tensor.has_storage() && !at::isTensorSubclassLike(tensor) && !tensor.is_neg();
    return isPlain && worksOnCpu(tensor) && tensor.layout() == at::kStrided &&
           tensor.scalar_type() == first.scalar_type() && tensor.is_non_overlapping_and_dense() &&
           tensor.sizes() == first.sizes() && tensor.strides() == first.strides();
  });
}

void step(const at::Tensor& weights, const at::Tensor& momentum, const at::Tensor& variance, const at::Tensor& gradient,
          const StepScales& scales) {
  check({weights, momentum, variance, gradient}, "step");
  if (weights.scalar_type() == at::kFloat) {
    stepOf<float>(weights, momentum, variance, gradient, scales);
  } else {
    stepOf<double>(weights, momentum, variance, gradient, scales);
  }
  noteChange(weights);
  noteChange(momentum);
}

void makeMomentum(const at::Tensor& gradient, const at::Tensor& momentum, double decay) {
  check({gradient, momentum}, "momentum");
  if (gradient.scalar_type() == at::kFloat) {
    makeMomentumOf<float>(gradient, momentum, decay);
  } else {
    makeMomentumOf<double>(gradient, momentum, decay);
  }
  noteChange(gradient);
}

}  // namespace bagua::adam
