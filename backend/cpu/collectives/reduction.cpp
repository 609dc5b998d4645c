// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/collectives/reduction.h"

#include <ATen/Dispatch.h>
#include <ATen/Dispatch_v2.h>
#include <ATen/OpMathType.h>
#include <ATen/ops/mul.h>
#include <c10/util/Exception.h>
#include <c10/util/TypeCast.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <functional>
#include <type_traits>

#include "backend/cpu/collectives/halves.h"
#include "backend/operation/reduction_names.h"
#include "backend/operation/tensor_bytes.h"
#include "backend/os/scratch_memory.h"

namespace bagua::reduction {
namespace {

using c10d::ReduceOp;

bool isNarrow(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

// Elements combined at a time: the accumulator stays in the first-level cache.
constexpr int64_t kBlock = 1024;

bool isBitwise(ReduceOp::RedOpType op) { return op == ReduceOp::BAND || op == ReduceOp::BOR || op == ReduceOp::BXOR; }

bool isOrder(ReduceOp::RedOpType op) { return op == ReduceOp::MIN || op == ReduceOp::MAX; }

bool isReducible(at::ScalarType dtype) {
  switch (dtype) {
    case at::kByte:
    case at::kChar:
    case at::kShort:
    case at::kInt:
    case at::kLong:
    case at::kUInt16:
    case at::kUInt32:
    case at::kUInt64:
    case at::kBool:
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat:
    case at::kDouble:
    case at::kComplexFloat:
    case at::kComplexDouble:
      return true;
    default:
      return false;
  }
}

// Where the contribution of each rank begins.
using Parts = std::vector<const void*>;
// How they are combined: one after the other, or neighbours first (see reduceHalves).
enum class Order { kSequence, kHalves };

// 16-bit floats accumulate in float; everything else in itself.
template <typename T>
using Accumulator = std::conditional_t<std::is_same_v<T, at::Half> || std::is_same_v<T, at::BFloat16>, float, T>;

template <typename A>
constexpr bool kIsComplex = c10::is_complex<A>::value;

// Integers wrap; unsigned arithmetic keeps that defined.
template <typename A>
struct Sum {
  A operator()(A a, A b) const {
    if constexpr (std::is_same_v<A, bool>) {
      return a || b;
    } else if constexpr (std::is_integral_v<A>) {
      using U = std::make_unsigned_t<A>;
      return static_cast<A>(static_cast<U>(a) + static_cast<U>(b));
    } else {
      return a + b;
    }
  }
};

template <typename A>
struct Product {
  A operator()(A a, A b) const {
    if constexpr (std::is_same_v<A, bool>) {
      return a && b;
    } else if constexpr (std::is_integral_v<A>) {
      // uint64_t: products of promoted 16-bit integers would overflow int.
      return static_cast<A>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
    } else {
      return a * b;
    }
  }
};

// Takes the one that comes before the other: std::less makes it the minimum, std::greater the maximum.
template <typename A, typename Before>
struct First {
  A operator()(A a, A b) const {
    if constexpr (std::is_floating_point_v<A>) {
      if (std::isnan(a)) return a;
      return Before{}(b, a) || std::isnan(b) ? b : a;
    } else {
      return Before{}(b, a) ? b : a;
    }
  }
};

// Division by `count`. By a power of two it is a multiplication, with the same result and several times faster.
template <typename A>
class Mean {
 public:
  explicit Mean(int64_t count) : count_(count), isPowerOfTwo_((count & (count - 1)) == 0) {}

  A operator()(A sum) const {
    if constexpr (std::is_integral_v<A>) {
      return static_cast<A>(sum / static_cast<std::conditional_t<std::is_signed_v<A>, int64_t, uint64_t>>(count_));
    } else if constexpr (kIsComplex<A>) {
      return sum / static_cast<typename A::value_type>(count_);
    } else {
      return sum / static_cast<A>(count_);
    }
  }
  [[nodiscard]] bool isProduct() const { return isPowerOfTwo_; }
  [[nodiscard]] A factor() const { return static_cast<A>(1.0 / static_cast<double>(count_)); }

 private:
  const int64_t count_;
  const bool isPowerOfTwo_;
};

// Elements [begin, begin + length) of `count` neighbours, from `parts` on. False where all of them are empty.
template <typename T, typename A, typename Combine>
bool combineHalves(const void* const* parts, size_t count, int64_t begin, int64_t length, A* total, Combine combine) {
  if (count == 1) {
    if (*parts == nullptr) return false;
    const T* const part = static_cast<const T*>(*parts) + begin;
    for (int64_t i = 0; i < length; ++i) total[i] = static_cast<A>(part[i]);
    return true;
  }
  if (!combineHalves<T>(parts, count / 2, begin, length, total, combine)) return false;
  std::array<A, kBlock> second;
  if (combineHalves<T>(parts + count / 2, count / 2, begin, length, second.data(), combine)) {
    for (int64_t i = 0; i < length; ++i) total[i] = combine(total[i], second[i]);
  }
  return true;
}

template <typename T, typename Combine, typename Finish>
void reduceBlocksOfHalves(const Parts& parts, int64_t numel, T* output, Combine combine, Finish finish) {
  using A = Accumulator<T>;
  std::array<A, kBlock> total;
  for (int64_t begin = 0; begin < numel; begin += kBlock) {
    const int64_t length = std::min(kBlock, numel - begin);
    combineHalves<T>(parts.data(), parts.size(), begin, length, total.data(), combine);
    for (int64_t i = 0; i < length; ++i) output[begin + i] = static_cast<T>(finish(total[i]));
  }
}

// `output` may be one of the parts.
template <typename T, typename Combine, typename Finish>
void reduceBlocks(const Parts& parts, Order order, int64_t numel, T* output, Combine combine, Finish finish) {
  if (order == Order::kHalves) return reduceBlocksOfHalves(parts, numel, output, combine, finish);
  using A = Accumulator<T>;
  const T* first = static_cast<const T*>(parts[0]);
  if (parts.size() == 2) {
    const T* second = static_cast<const T*>(parts[1]);
    for (int64_t i = 0; i < numel; ++i) {
      output[i] = static_cast<T>(finish(combine(static_cast<A>(first[i]), static_cast<A>(second[i]))));
    }
    return;
  }
  std::array<A, kBlock> total;
  for (int64_t begin = 0; begin < numel; begin += kBlock) {
    const int64_t length = std::min(kBlock, numel - begin);
    for (int64_t i = 0; i < length; ++i) total[i] = static_cast<A>(first[begin + i]);
    for (size_t part = 1; part < parts.size(); ++part) {
      const T* next = static_cast<const T*>(parts[part]) + begin;
      for (int64_t i = 0; i < length; ++i) total[i] = combine(total[i], static_cast<A>(next[i]));
    }
    for (int64_t i = 0; i < length; ++i) output[begin + i] = static_cast<T>(finish(total[i]));
  }
}

template <typename T>
void averageTyped(const Parts& parts, Order order, int64_t numel, T* output, int64_t contributors) {
  using A = Accumulator<T>;
  const Mean<A> mean(contributors);
  if constexpr (std::is_floating_point_v<A>) {
    if (mean.isProduct()) {
      const A factor = mean.factor();
      return reduceBlocks(parts, order, numel, output, Sum<A>{}, [factor](A value) { return value * factor; });
    }
  }
  reduceBlocks(parts, order, numel, output, Sum<A>{}, mean);
}

template <typename T>
void reduceTyped(const Parts& parts, Order order, int64_t numel, T* output, ReduceOp::RedOpType op,
                 int64_t contributors) {
  using A = Accumulator<T>;
  const auto reduceWith = [&](auto combine) {
    reduceBlocks(parts, order, numel, output, combine, [](A value) { return value; });
  };
  switch (op) {
    case ReduceOp::SUM:
    case ReduceOp::PREMUL_SUM:
      return reduceWith(Sum<A>{});
    case ReduceOp::PRODUCT:
      return reduceWith(Product<A>{});
    case ReduceOp::AVG:
      if constexpr (!std::is_same_v<T, bool>) return averageTyped(parts, order, numel, output, contributors);
      break;
    case ReduceOp::MIN:
      if constexpr (!kIsComplex<A>) return reduceWith(First<A, std::less<A>>{});
      break;
    case ReduceOp::MAX:
      if constexpr (!kIsComplex<A>) return reduceWith(First<A, std::greater<A>>{});
      break;
    case ReduceOp::BAND:
      if constexpr (std::is_integral_v<A>) return reduceWith([](A a, A b) { return static_cast<A>(a & b); });
      break;
    case ReduceOp::BOR:
      if constexpr (std::is_integral_v<A>) return reduceWith([](A a, A b) { return static_cast<A>(a | b); });
      break;
    case ReduceOp::BXOR:
      if constexpr (std::is_integral_v<A>) return reduceWith([](A a, A b) { return static_cast<A>(a ^ b); });
      break;
    default:
      break;
  }
  TORCH_INTERNAL_ASSERT(false, "reduction ", reductionName(op), " should have been refused");
}

// NOLINTNEXTLINE(readability-function-size): the dispatch macro expands to a block per dtype
void reduceInOrder(const Parts& parts, Order order, const ReduceOp& op, int64_t contributors, const Elements& output) {
  AT_DISPATCH_V2(output.dtype, "bagua_reduce_parts", AT_WRAP([&] {
                   reduceTyped(parts, order, output.numel, reinterpret_cast<scalar_t*>(output.data), op, contributors);
                 }),
                 AT_EXPAND(AT_ALL_TYPES_AND_COMPLEX), AT_EXPAND(AT_BAREBONES_UNSIGNED_TYPES), at::kHalf, at::kBFloat16,
                 at::kBool);
}

}  // namespace

void checkSupported(const ArgumentChecks& checks, const ReduceOp& op, at::ScalarType dtype) {
  TORCH_CHECK_TYPE(isReducible(dtype), checks.where(), ": cannot reduce tensors of dtype ", at::toString(dtype));
  const ReduceOp::RedOpType kind = op;
  const bool isFloat = at::isFloatingType(dtype) || at::isComplexType(dtype);
  TORCH_CHECK_VALUE(kind <= ReduceOp::PREMUL_SUM, checks.where(), ": unknown reduce operation ",
                    static_cast<int>(kind));
  TORCH_CHECK_VALUE(!(isBitwise(kind) && isFloat), checks.where(), ": reduce operation ", reductionName(kind),
                    " has no meaning for dtype ", at::toString(dtype), "; it takes integers and bools");
  TORCH_CHECK_VALUE(!(isOrder(kind) && at::isComplexType(dtype)), checks.where(), ": reduce operation ",
                    reductionName(kind), " has no meaning for complex dtype ", at::toString(dtype));
  TORCH_CHECK_VALUE(!(kind == ReduceOp::AVG && dtype == at::kBool), checks.where(),
                    ": reduce operation AVG has no meaning for bools");
  TORCH_CHECK_VALUE(!(kind == ReduceOp::PREMUL_SUM && !isFloat), checks.where(),
                    ": reduce operation PREMUL_SUM takes floating-point tensors, got ", at::toString(dtype));
}

at::Tensor prepare(const at::Tensor& input, const ReduceOp& op) {
  if (static_cast<ReduceOp::RedOpType>(op) != ReduceOp::PREMUL_SUM) return input;
  const auto* factor = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_VALUE(factor != nullptr, "reduce operation PREMUL_SUM came without its factor");
  return factor->tensor_factor.defined() ? at::mul(input, factor->tensor_factor.to(input.dtype()))
                                         : at::mul(input, factor->double_factor);
}

at::Tensor widened(const at::Tensor& flat) {
  return isNarrow(flat.scalar_type()) ? scratchCopy(flat, at::kFloat) : flat;
}

int64_t wideItemSize(const at::Tensor& flat) {
  return isNarrow(flat.scalar_type()) ? int64_t{sizeof(float)} : itemSize(flat);
}

TwoSteps inTwoSteps(const ReduceOp& op, at::ScalarType dtype) {
  if (op != ReduceOp::AVG) return {op, op};
  if (isNarrow(dtype)) return {ReduceOp::AVG, ReduceOp::SUM};
  return {ReduceOp::SUM, ReduceOp::AVG};
}

void reduceParts(const Parts& parts, const ReduceOp& op, int64_t contributors, const Elements& output) {
  reduceInOrder(parts, Order::kSequence, op, contributors, output);
}

void reduceHalves(const Parts& parts, const ReduceOp& op, int64_t contributors, const at::Tensor& output) {
  TORCH_INTERNAL_ASSERT(std::has_single_bit(parts.size()), "reduction of ", parts.size(), " halves");
  reduceInOrder(parts, Order::kHalves, op, contributors, elementsOf(output));
}

void reduceHosts(const Parts& parts, const ReduceOp& op, int64_t contributors, const at::Tensor& output) {
  const auto count = static_cast<int>(parts.size());
  if (count <= kMostInOrder) return reduceParts(parts, op, contributors, output);
  const Halves halves(count);
  Parts slots(size_t{1} << static_cast<unsigned>(halves.levels()), nullptr);
  for (int host = 0; host < count; ++host) slots[halves.slotOf(host, halves.levels())] = parts[host];
  reduceHalves(slots, op, contributors, output);
}

Elements elementsOf(const at::Tensor& tensor) {
  return {tensor.scalar_type(), tensor.numel(), static_cast<uint8_t*>(tensor.mutable_data_ptr())};
}

void reduceParts(const Parts& parts, const ReduceOp& op, int64_t contributors, const at::Tensor& output) {
  reduceParts(parts, op, contributors, elementsOf(output));
}

}  // namespace bagua::reduction
