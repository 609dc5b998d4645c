// SPDX-License-Identifier: Apache-2.0
#include "backend/sparse_reduction.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

namespace bagua {
namespace {

// Every rank's rows, which differ in number: gathered at the length of the longest and cut.
std::vector<at::Tensor> gatherRows(Communicator& communicator, const at::Tensor& rows,
                                   const std::vector<int64_t>& counts) {
  const int64_t longest = *std::max_element(counts.begin(), counts.end());
  auto shape = rows.sizes().vec();
  shape[0] = longest;
  at::Tensor padded = at::zeros(shape, rows.options());
  padded.narrow(0, 0, rows.size(0)).copy_(rows);
  shape.insert(shape.begin(), communicator.size());
  at::Tensor gathered = at::empty(shape, rows.options());
  communicator.allGather(gathered, padded);
  std::vector<at::Tensor> perRank;
  for (int rank = 0; rank < communicator.size(); ++rank) perRank.push_back(gathered[rank].narrow(0, 0, counts[rank]));
  return perRank;
}

std::vector<int64_t> gatherCounts(Communicator& communicator, int64_t own, at::Device device) {
  const at::Tensor count = at::full({1}, own, at::dtype(at::kLong).device(device));
  at::Tensor all = at::empty({communicator.size()}, count.options());
  communicator.allGather(all, count);
  const at::Tensor onHost = all.cpu();
  return {onHost.const_data_ptr<int64_t>(), onHost.const_data_ptr<int64_t>() + onHost.numel()};
}

}  // namespace

void allReduceSparse(Communicator& communicator, at::Tensor& tensor, bool average) {
  const at::Tensor own = tensor.coalesce();
  const auto counts = gatherCounts(communicator, own._nnz(), own.device());
  // Rows of (index, ...) so that both parts are cut along dimension 0.
  const at::Tensor indices = at::cat(gatherRows(communicator, own._indices().t().contiguous(), counts)).t();
  const at::Tensor values = at::cat(gatherRows(communicator, own._values().contiguous(), counts));
  at::Tensor sum = at::sparse_coo_tensor(indices, values, own.sizes()).coalesce();
  if (average) {
    const bool isIntegral = at::isIntegralType(sum.scalar_type(), /*includeBool=*/false);
    at::Tensor total = sum._values();
    isIntegral ? total.div_(communicator.size(), "trunc") : total.div_(communicator.size());
  }
  tensor.copy_(sum);
}

}  // namespace bagua
