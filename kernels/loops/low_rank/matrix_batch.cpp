// SPDX-License-Identifier: Apache-2.0
#include "kernels/loops/low_rank/matrix_batch.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <c10/util/Exception.h>

#include <type_traits>

#include "kernels/loops/low_rank/low_rank_loops.h"

namespace bagua::low_rank {
namespace {

template <class T>
const MatrixLoops<T>& fastest() {
  const Loops& loops = *availableLoops().back();
  if constexpr (std::is_same_v<T, float>) {
    return loops.ofFloat;
  } else {
    return loops.ofDouble;
  }
}

at::Tensor stacked(const std::vector<at::Tensor>& matrices) {
  return matrices.size() == 1 ? matrices[0].unsqueeze(0) : at::stack(matrices);
}

template <class T, class Visit>
void forEachOf(const std::vector<at::Tensor>& matrices, const std::vector<at::Tensor>& residuals, const at::Tensor& p,
               const at::Tensor& q, Visit&& visit) {
  T* ofP = p.mutable_data_ptr<T>();
  T* ofQ = q.mutable_data_ptr<T>();
  for (size_t i = 0; i < matrices.size(); ++i) {
    const Arguments<T> arguments{.values = matrices[i].mutable_data_ptr<T>(),
                                 .residual = residuals.empty() ? nullptr : residuals[i].mutable_data_ptr<float>(),
                                 .rows = matrices[i].size(0),
                                 .columns = matrices[i].size(1),
                                 .rank = p.size(1)};
    visit(fastest<T>(), arguments, ofP, ofQ);
    ofP += arguments.rank * arguments.rows;
    ofQ += arguments.rank * arguments.columns;
  }
}

// Calls visit(loops, arguments of a matrix, its part of P, its part of Q) for each matrix.
template <class Visit>
void forEach(const std::vector<at::Tensor>& matrices, const std::vector<at::Tensor>& residuals, const at::Tensor& p,
             const at::Tensor& q, Visit&& visit) {
  if (p.scalar_type() == at::kDouble) return forEachOf<double>(matrices, residuals, p, q, visit);
  forEachOf<float>(matrices, residuals, p, q, visit);
}

}  // namespace

const std::vector<const Loops*>& availableLoops() {
  static const std::vector<const Loops*> kAvailable = [] {
    std::vector<const Loops*> available = {&scalarLoops()};
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) available.push_back(&avx2Loops());
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq")) {
      available.push_back(&avx512Loops());
    }
#endif
    return available;
  }();
  return kAvailable;
}

at::ScalarType MatrixBatch::factorType(at::ScalarType gradients) {
  return gradients == at::kDouble ? at::kDouble : at::kFloat;
}

MatrixBatch::MatrixBatch(std::vector<at::Tensor> gradients, std::vector<at::Tensor> residuals,
                         std::vector<at::Tensor> nextResiduals)
    : gradients_(std::move(gradients)), residuals_(std::move(residuals)), nextResiduals_(std::move(nextResiduals)) {
  TORCH_INTERNAL_ASSERT(!gradients_.empty() && (residuals_.empty() || residuals_.size() == gradients_.size()));
  TORCH_INTERNAL_ASSERT(residuals_.size() == nextResiduals_.size());
}

void MatrixBatch::gather(at::ScalarType type) {
  sums_ = stacked(gradients_).to(type);
  if (!residuals_.empty()) sums_ = sums_ + stacked(residuals_);
}

void MatrixBatch::multiply(const at::Tensor& q, at::Tensor& p) {
  const bool isInPlace = isOnHost() && gradients_[0].scalar_type() == q.scalar_type();
  if (!isInPlace) gather(q.scalar_type());
  if (!isOnHost()) {
    at::bmm_out(p, q, sums_.transpose(1, 2));
    return;
  }
  matrices_ = isInPlace ? gradients_ : sums_.unbind(0);
  forEach(
      matrices_, isInPlace ? residuals_ : std::vector<at::Tensor>(), p, q,
      [](const auto& loops, const auto& matrix, auto* toP, const auto* fromQ) { loops.multiply(matrix, fromQ, toP); });
}

void MatrixBatch::multiplyTransposed(const at::Tensor& p, at::Tensor& q) {
  if (!isOnHost()) {
    at::bmm_out(q, p, sums_);
    return;
  }
  forEach(matrices_, {}, p, q, [](const auto& loops, const auto& matrix, const auto* fromP, auto* toQ) {
    loops.multiplyTransposed(matrix, fromP, toQ);
  });
}

void MatrixBatch::replace(const at::Tensor& p, const at::Tensor& q, const at::Tensor& areUsable) {
  if (!isOnHost()) return replaceOnDevice(p, q, areUsable);
  const bool keepsRest = areUsable.item<bool>();
  if (sums_.defined()) return replaceRounded(p, q, keepsRest);
  forEach(gradients_, nextResiduals_, p, q,
          [&](const auto& loops, const auto& matrix, const auto* fromP, const auto* fromQ) {
            loops.replace(matrix, fromP, fromQ, keepsRest);
          });
}

// 16-bit gradients on the CPU: the rest is what is left of M when the product has been rounded.
void MatrixBatch::replaceRounded(const at::Tensor& p, const at::Tensor& q, bool areUsable) {
  std::vector<at::Tensor> products;
  for (const auto& sum : matrices_) products.push_back(at::empty_like(sum));
  forEach(products, {}, p, q, [&](const auto& loops, const auto& matrix, const auto* fromP, const auto* fromQ) {
    loops.replace(matrix, fromP, fromQ, false);
  });
  at::_foreach_copy_(gradients_, products);
  for (size_t i = 0; i < nextResiduals_.size() && areUsable; ++i) {
    const at::Tensor rest = matrices_[i] - gradients_[i];
    nextResiduals_[i].copy_(at::where(at::isfinite(rest), rest, nextResiduals_[i]));
  }
}

void MatrixBatch::replaceOnDevice(const at::Tensor& p, const at::Tensor& q, const at::Tensor& areUsable) {
  const at::Tensor product = at::bmm(p.transpose(1, 2), q).to(gradients_[0].scalar_type());
  // The last use of gradients that sums_ may be a view of.
  at::Tensor rest;
  if (!residuals_.empty()) rest = (sums_ - product).to(at::kFloat);
  at::_foreach_copy_(gradients_, product.unbind(0));
  if (residuals_.empty()) return;
  const at::Tensor isKept = at::isfinite(rest).logical_and_(areUsable);
  at::_foreach_copy_(nextResiduals_, at::where(isKept, rest, stacked(nextResiduals_)).unbind(0));
}

}  // namespace bagua::low_rank
