// SPDX-License-Identifier: Apache-2.0
#include "backend/operation/sparse_reduction.h"

#include <ATen/ops/aminmax.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>

#include <algorithm>

namespace bagua {
namespace {

// Every rank's rows, which differ in number: gathered at the length of the longest and cut.
std::vector<at::Tensor> gatherRows(Communicator& communicator, const at::Tensor& rows,
                                   const std::vector<int64_t>& counts) {
  const int64_t longest = *std::ranges::max_element(counts);
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

// What a rank says of its tensor: the number of entries, how many dimensions are sparse, and its shape.
std::vector<int64_t> factsOf(const at::Tensor& own) {
  std::vector<int64_t> facts{own._nnz(), own.sparse_dim(), own.dim()};
  // Shapes of any length in a message of one length: equal ones have an equal fold.
  int64_t fold = 0;
  for (const int64_t size : own.sizes()) fold = (fold * 1'000'003 + size) % 1'000'000'007;
  facts.push_back(fold);
  return facts;
}

std::vector<std::vector<int64_t>> gatherFacts(Communicator& communicator, const at::Tensor& own) {
  const auto facts = factsOf(own);
  const at::Tensor sent = at::tensor(facts, at::kLong).to(own.device());
  at::Tensor all = at::empty({communicator.size(), sent.numel()}, sent.options());
  communicator.allGather(all, sent);
  const at::Tensor onCpu = all.cpu();
  std::vector<std::vector<int64_t>> perRank;
  for (int rank = 0; rank < communicator.size(); ++rank) {
    const auto* const begin = onCpu.const_data_ptr<int64_t>() + rank * sent.numel();
    perRank.emplace_back(begin, begin + sent.numel());
  }
  perRank[communicator.rank()] = facts;
  return perRank;
}

// Entries that a coalesced tensor of this shape has room for. As torch refuses shapes of more elements than a number
// can tell, this is one.
int64_t mostEntries(const at::Tensor& tensor) {
  return c10::multiply_integers(tensor.sizes().slice(0, tensor.sparse_dim()));
}

// Entries of each rank. Throws on all ranks where they cannot be added. A peer's word, which decides how much memory
// they take: no more than the entries that the own tensor's shape has room for, since every rank coalesces first.
std::vector<int64_t> agreedCounts(const std::vector<std::vector<int64_t>>& facts, const at::Tensor& own) {
  const int64_t most = mostEntries(own);
  std::vector<int64_t> counts;
  for (size_t rank = 0; rank < facts.size(); ++rank) {
    const bool isEqual = std::equal(facts[rank].begin() + 1, facts[rank].end(), facts[0].begin() + 1);
    TORCH_CHECK_VALUE(isEqual, "sparse tensors of rank 0 and rank ", rank, " cannot be added: ", facts[0][1], " and ",
                      facts[rank][1], " sparse dimensions of ", facts[0][2], " and ", facts[rank][2],
                      ", or different shapes");
    const int64_t count = facts[rank][0];
    TORCH_CHECK_VALUE(0 <= count && count <= most, "sparse tensors cannot be added: rank ", rank, " has ", count,
                      " coalesced entries, and one of shape ", own.sizes(), " with ", own.sparse_dim(),
                      " sparse dimensions has from 0 to ", most, " of them. Was it marked as coalesced and is not?");
    counts.push_back(count);
  }
  return counts;
}

// Rows of indices. On CUDA the host waits for the answer.
bool areWithin(const at::Tensor& indices, at::IntArrayRef sizes) {
  if (indices.numel() == 0) return true;
  const auto [least, greatest] = at::aminmax(indices, /*dim=*/0);
  const at::Tensor bounds = at::stack({least, greatest}).cpu();
  const auto* const lowest = bounds.const_data_ptr<int64_t>();
  const auto* const highest = lowest + indices.size(1);
  for (int64_t dimension = 0; dimension < indices.size(1); ++dimension) {
    if (lowest[dimension] < 0 || highest[dimension] >= sizes[dimension]) return false;
  }
  return true;
}

// Who uses a sparse gradient writes to where its indices say, without looking at them again.
void checkIndices(const at::Tensor& all, const std::vector<at::Tensor>& perRank, at::IntArrayRef sizes) {
  if (areWithin(all, sizes)) return;
  for (size_t rank = 0; rank < perRank.size(); ++rank) {
    TORCH_CHECK_VALUE(areWithin(perRank[rank], sizes), "sparse tensors cannot be added: rank ", rank,
                      " has an index outside of the shape ", sizes,
                      ". Let torch look for it there: torch.sparse.check_sparse_tensor_invariants.enable()");
  }
}

}  // namespace

void allReduceSparse(Communicator& communicator, at::Tensor& tensor, bool average) {
  const at::Tensor own = tensor.coalesce();
  const auto counts = agreedCounts(gatherFacts(communicator, own), own);
  // Rows of (index, ...) so that both parts are cut along dimension 0.
  const auto indicesPerRank = gatherRows(communicator, own._indices().t().contiguous(), counts);
  const at::Tensor indices = at::cat(indicesPerRank);
  // Before the values travel: every rank sees the same indices, so all of them stop here or none.
  checkIndices(indices, indicesPerRank, own.sizes());
  at::Tensor values = at::cat(gatherRows(communicator, own._values().contiguous(), counts));
  // Numbers of 16 bits are added and divided in 32 and rounded once, as those of dense tensors are.
  if (at::isReducedFloatingType(values.scalar_type())) values = values.to(at::kFloat);
  at::Tensor sum = at::sparse_coo_tensor(indices.t(), values, own.sizes()).coalesce();
  if (average) {
    const bool isIntegral = at::isIntegralType(sum.scalar_type(), /*includeBool=*/false);
    at::Tensor total = sum._values();
    isIntegral ? total.div_(communicator.size(), "trunc") : total.div_(communicator.size());
  }
  tensor.copy_(sum);
}

}  // namespace bagua
