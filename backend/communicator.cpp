// SPDX-License-Identifier: Apache-2.0
#include "backend/communicator.h"

#include <ATen/ops/full.h>
#include <ATen/ops/sum.h>
#include <c10/util/Exception.h>

#include <numeric>

#include "backend/operation/tensor_bytes.h"
#include "backend/os/scratch_memory.h"

namespace bagua {

Traffic& Traffic::operator+=(const Traffic& other) {
  inHostBytes += other.inHostBytes;
  betweenHostsBytes += other.betweenHostsBytes;
  return *this;
}

Traffic Traffic::since(const Traffic& earlier) const {
  return {.inHostBytes = inHostBytes - earlier.inHostBytes,
          .betweenHostsBytes = betweenHostsBytes - earlier.betweenHostsBytes};
}

void Communicator::allGatherInPieces(at::Tensor& output, const at::Tensor& input, const Pipeline& pipeline) {
  pipeline.beforeSending(0, input.numel());
  allGather(output, input);
  pipeline.afterReceiving(0, input.numel());
}

void Communicator::allToAllInPieces(at::Tensor& output, const at::Tensor& input, const Splits& outputSplits,
                                    const Splits& inputSplits, const Pipeline& pipeline) {
  const auto longestPart = [this](const at::Tensor& tensor, const Splits& splits) {
    return splits.empty() ? tensor.numel() / size() : *std::max_element(splits.begin(), splits.end());
  };
  pipeline.beforeSending(0, longestPart(input, inputSplits));
  allToAll(output, input, outputSplits, inputSplits);
  pipeline.afterReceiving(0, longestPart(output, outputSplits));
}

at::Tensor Communicator::ownPartInHost(const at::Tensor& flat, const Splits& parts) const {
  const auto own = parts.begin() + topology_->localRank(rank_);
  return flat.narrow(0, std::accumulate(parts.begin(), own, int64_t{0}), *own);
}

Communicator::Splits Communicator::splitsInHost(const Splits& parts) const {
  const auto& ranks = hostRanks();
  TORCH_INTERNAL_ASSERT(parts.size() == ranks.size());
  Splits splits(size_, 0);
  for (size_t i = 0; i < ranks.size(); ++i) splits[ranks[i]] = parts[i];
  return splits;
}

void Communicator::divide(at::Tensor& tensor, int64_t divisor) {
  if (divisor == 1) return;
  const bool isShort = tensor.element_size() < 4;
  at::Tensor quotient = isShort ? tensor.to(at::kFloat) : tensor;
  quotient.div_(at::full({}, divisor, quotient.options()));
  if (isShort) tensor.copy_(quotient);
}

void Communicator::reduceScatterInHost(at::Tensor& flat, const Splits& parts, int64_t divisor) {
  const at::Tensor own = ownPartInHost(flat, parts);
  const auto count = static_cast<int64_t>(parts.size());
  at::Tensor copies = scratchTensor({count, own.numel()}, flat.options());
  allToAll(copies, flat, splitsInHost(Splits(parts.size(), own.numel())), splitsInHost(parts));
  at::Tensor sum = copies.sum(0, false, flat.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  divide(sum, divisor);
  own.copy_(sum);
}

void Communicator::allGatherInHost(at::Tensor& flat, const Splits& parts) {
  const at::Tensor own = ownPartInHost(flat, parts);
  const at::Tensor sent = own.repeat({static_cast<int64_t>(parts.size())});
  allToAll(flat, sent, splitsInHost(parts), splitsInHost(Splits(parts.size(), own.numel())));
}

void Communicator::countSentTo(int peer, int64_t bytes) {
  if (peer == rank_) return;
  const bool isLocal = topology_->hostOf(peer) == topology_->hostOf(rank_);
  (isLocal ? traffic_.inHostBytes : traffic_.betweenHostsBytes) += bytes;
}

void Communicator::countSentToEach(int64_t bytes) { countSentEvenly(bytes * (size_ - 1)); }

void Communicator::countSentEvenly(int64_t bytes) {
  if (size_ == 1) return;
  const auto local = static_cast<int64_t>(topology_->ranksOf(topology_->hostOf(rank_)).size()) - 1;
  const int64_t inHost = bytes * local / (size_ - 1);
  traffic_ += {.inHostBytes = inHost, .betweenHostsBytes = bytes - inHost};
}

void Communicator::countSentParts(const at::Tensor& input, const Splits& splits) {
  const int64_t item = itemSize(input);
  if (splits.empty()) return countSentToEach(input.numel() / size_ * item);
  for (int peer = 0; peer < size_; ++peer) countSentTo(peer, splits[peer] * item);
}

}  // namespace bagua
