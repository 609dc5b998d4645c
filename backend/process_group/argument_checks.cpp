// SPDX-License-Identifier: Apache-2.0
#include "backend/process_group/argument_checks.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

namespace bagua {

std::string ArgumentChecks::where() const {
  return c10::str(operation_, " on rank ", group_.rank, " of ", group_.size);
}

void ArgumentChecks::input(const at::Tensor& tensor, const char* role) const {
  TORCH_CHECK_VALUE(tensor.defined(), where(), ": ", role, " is undefined");
  TORCH_CHECK_VALUE(tensor.device().is_cpu() || tensor.device().is_cuda(), where(), ": ", role,
                    " must be on cpu or cuda, got ", tensor.device());
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, where(), ": ", role, " must be dense, got layout ",
                    tensor.layout());
  TORCH_CHECK_VALUE(!tensor.is_conj() && !tensor.is_neg(), where(), ": ", role,
                    " stands for the conjugated or negated numbers of another tensor: pass its resolve_conj() or "
                    "resolve_neg()");
}

void ArgumentChecks::sameDevice(const at::Tensor& tensor, const at::Tensor& first, const char* role) const {
  TORCH_CHECK_VALUE(tensor.device() == first.device(), where(), ": each ", role, " must be on ", first.device(),
                    " like the first, got ", tensor.device());
}

void ArgumentChecks::tensor(const at::Tensor& tensor, const char* role) const {
  input(tensor, role);
  TORCH_CHECK_VALUE(tensor.is_contiguous(tensor.suggest_memory_format()), where(), ": ", role,
                    " must be contiguous, got sizes ", tensor.sizes(), " with strides ", tensor.strides());
}

const at::Tensor& ArgumentChecks::singleInput(const std::vector<at::Tensor>& tensors) const {
  TORCH_CHECK_VALUE(tensors.size() == 1, where(), ": expected one input, got ", tensors.size());
  input(tensors[0]);
  return tensors[0];
}

const at::Tensor& ArgumentChecks::single(const std::vector<at::Tensor>& tensors, const char* role) const {
  TORCH_CHECK_VALUE(tensors.size() == 1, where(), ": expected one ", role, ", got ", tensors.size());
  tensor(tensors[0], role);
  return tensors[0];
}

void ArgumentChecks::sameKind(const at::Tensor& tensor, const at::Tensor& like, const char* role) const {
  TORCH_CHECK_TYPE(tensor.scalar_type() == like.scalar_type(), where(), ": ", role, " must be of dtype ",
                   like.scalar_type(), " like the others, got ", tensor.scalar_type());
  TORCH_CHECK_VALUE(tensor.device() == like.device(), where(), ": ", role, " must be on ", like.device(),
                    " like the others, got ", tensor.device());
}

void ArgumentChecks::inputsAlike(const std::vector<at::Tensor>& tensors, const at::Tensor& like) const {
  for (const auto& one : tensors) {
    input(one);
    sameKind(one, like, "input");
  }
}

void ArgumentChecks::alike(const std::vector<at::Tensor>& tensors, const at::Tensor& like, const char* role) const {
  for (const auto& one : tensors) {
    tensor(one, role);
    sameKind(one, like, role);
  }
}

void ArgumentChecks::rowMajor(const at::Tensor& tensor, const char* role) const {
  TORCH_CHECK_VALUE(tensor.is_contiguous(), where(), ": ", role, " must be contiguous in row-major order, got sizes ",
                    tensor.sizes(), " with strides ", tensor.strides());
}

void ArgumentChecks::splitSizes(const std::vector<int64_t>& splits, const at::Tensor& tensor, const char* role) const {
  const int64_t rows = tensor.dim() == 0 ? tensor.numel() : tensor.size(0);
  if (splits.empty()) {
    TORCH_CHECK_VALUE(rows % group_.size == 0, where(), ": dimension 0 of ", role, " has size ", rows,
                      ", which does not divide evenly among ", group_.size, " ranks; give split sizes");
    return;
  }
  count(splits.size(), group_.size, "split sizes, one per rank");
  int64_t sum = 0;
  for (const int64_t split : splits) {
    TORCH_CHECK_VALUE(split >= 0, where(), ": split sizes of ", role, " must not be negative, got ", split);
    sum += split;
  }
  TORCH_CHECK_VALUE(sum == rows, where(), ": split sizes of ", role, " must add up to the size of its dimension 0, ",
                    rows, ", got ", sum);
}

void ArgumentChecks::sameShape(const at::Tensor& tensor, const at::Tensor& like, const char* role) const {
  TORCH_CHECK_VALUE(tensor.sizes() == like.sizes(), where(), ": ", role, " must be of sizes ", like.sizes(), ", got ",
                    tensor.sizes());
}

void ArgumentChecks::numel(const at::Tensor& tensor, int64_t expected, const char* role) const {
  TORCH_CHECK_VALUE(tensor.numel() == expected, where(), ": ", role, " must have ", expected, " elements, got ",
                    tensor.numel(), " (sizes ", tensor.sizes(), ")");
}

void ArgumentChecks::count(size_t actual, size_t expected, const char* what) const {
  TORCH_CHECK_VALUE(actual == expected, where(), ": expected ", expected, " ", what, ", got ", actual);
}

void ArgumentChecks::rank(int64_t rank, const char* role) const {
  TORCH_CHECK_VALUE(rank >= 0 && rank < group_.size, where(), ": ", role, " rank must be in [0, ", group_.size,
                    "), got ", rank);
}

}  // namespace bagua
