// SPDX-License-Identifier: Apache-2.0
#include "backend/sparse_reduction.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

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

// What every rank says of its tensor: the number of rows, how many dimensions are sparse, and its shape.
std::vector<std::vector<int64_t>> gatherFacts(Communicator& communicator, const at::Tensor& own) {
  std::vector<int64_t> facts{own._nnz(), own.sparse_dim(), own.dim()};
  // Shapes of any length in a message of one length: equal ones have an equal fold.
  int64_t fold = 0;
  for (const int64_t size : own.sizes()) fold = (fold * 1'000'003 + size) % 1'000'000'007;
  facts.push_back(fold);
  const at::Tensor sent = at::tensor(facts, at::kLong).to(own.device());
  at::Tensor all = at::empty({communicator.size(), sent.numel()}, sent.options());
  communicator.allGather(all, sent);
  const at::Tensor onHost = all.cpu();
  std::vector<std::vector<int64_t>> perRank;
  for (int rank = 0; rank < communicator.size(); ++rank) {
    const auto* const begin = onHost.const_data_ptr<int64_t>() + rank * sent.numel();
    perRank.emplace_back(begin, begin + sent.numel());
  }
  return perRank;
}

// Rows of each rank. Throws on all ranks where they cannot be added.
std::vector<int64_t> agreedCounts(const std::vector<std::vector<int64_t>>& facts) {
  std::vector<int64_t> counts;
  for (size_t rank = 0; rank < facts.size(); ++rank) {
    const bool isEqual = std::equal(facts[rank].begin() + 1, facts[rank].end(), facts[0].begin() + 1);
    TORCH_CHECK_VALUE(isEqual, "sparse tensors of rank 0 and rank ", rank, " cannot be added: ", facts[0][1], " and ",
                      facts[rank][1], " sparse dimensions of ", facts[0][2], " and ", facts[rank][2],
                      ", or different shapes");
    counts.push_back(facts[rank][0]);
  }
  return counts;
}

}  // namespace

void allReduceSparse(Communicator& communicator, at::Tensor& tensor, bool average) {
  const at::Tensor own = tensor.coalesce();
  const auto counts = agreedCounts(gatherFacts(communicator, own));
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
