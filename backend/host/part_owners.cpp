// SPDX-License-Identifier: Apache-2.0
#include "backend/host/part_owners.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "backend/host/reduction.h"
#include "backend/operation/tensor_bytes.h"

namespace bagua {
namespace {

// Bounds the scratch memory of a reduction (one bucket can be the whole model in the first iteration of DDP). What is
// on its way fits in: at 1 Gbit/s and 50 ms that is 6 MB, at 5 Gbit/s 31.
constexpr int64_t kScratchBytes = int64_t{32} << 20;
// From this size on a broadcast to more than two hosts sends each a part, which they forward to each other.
constexpr int64_t kScatteredBroadcastBytes = int64_t{256} << 10;

// Equal parts of a flat tensor, the last ones shorter or empty.
class Parts {
 public:
  Parts(const at::Tensor& flat, int count) : flat_(flat), length_((flat.numel() + count - 1) / count) {}

  [[nodiscard]] int64_t begin(int part) const { return std::min(part * length_, flat_.numel()); }
  [[nodiscard]] at::Tensor operator[](int part) const {
    return flat_.narrow(0, begin(part), begin(part + 1) - begin(part));
  }

 private:
  const at::Tensor& flat_;
  const int64_t length_;
};

}  // namespace

// What comes from one of `count` ranks, in a part of the scratch memory that is filled again and again.
class Scratch {
 public:
  Scratch(int64_t bytes, int count) : memory_(at::empty({std::min(bytes, roomOf(count))}, at::kByte)), bytes_(bytes) {}

  [[nodiscard]] Wire::Exchange from(int peer, const at::Tensor& sent) const { return {peer, sent, memory_, bytes_}; }
  // Where byte `begin` of the message lies.
  [[nodiscard]] const void* at(int64_t begin) const {
    return static_cast<const uint8_t*>(memory_.const_data_ptr()) + begin % std::max<int64_t>(memory_.numel(), 1);
  }

 private:
  static int64_t roomOf(int count) {
    constexpr int64_t kLeast = int64_t{4} << 20;
    return std::max(kScratchBytes / count / Wire::kPieceBytes * Wire::kPieceBytes, kLeast);
  }
  const at::Tensor memory_;
  const int64_t bytes_;
};

void OneExchangeLimit::agree(const std::vector<int64_t>& proposals) {
  bytes_ = std::clamp(*std::min_element(proposals.begin(), proposals.end()), kLeast, kMost);
}

PartOwners::PartOwners(std::vector<int> ranks, int ownHost, int64_t contributors, ExchangeInPieces exchange)
    : ranks_(std::move(ranks)), ownHost_(ownHost), contributors_(contributors), exchange_(std::move(exchange)) {}

// Between two ranks, both reduce everything: that sends as many bytes as if each reduced a half and sent the result,
// and takes one one-way delay instead of two.
void PartOwners::allReduce(at::Tensor& flat, const ReduceOp& op, OneExchangeLimit& limit, const LineTo& lineTo) const {
  if (flat.numel() == 0) return;
  if (count() == 2) return allReduceWhole(flat, op);
  const at::Tensor proposals = at::zeros({count()}, at::kLong);
  Wire::Exchanges also;
  if (limit.isDue()) {
    proposals[ownHost_] = proposedLimit(lineTo);
    for (int step = 1; step < count(); ++step) {
      const int host = hostAfter(step);
      also.push_back({ranks_[host], bytesOf(proposals[ownHost_]), bytesOf(proposals[host])});
    }
  }
  const bool isSmall = static_cast<int64_t>(flat.nbytes()) <= limit.bytes() || flat.numel() < count();
  isSmall ? allReduceWhole(flat, op, also) : allReduceInParts(flat, op, also);
  const auto* const begin = proposals.const_data_ptr<int64_t>();
  if (limit.isDue()) limit.agree({begin, begin + count()});
  limit.afterCall();
}

int64_t PartOwners::proposedLimit(const LineTo& lineTo) const {
  std::chrono::duration<double> delay{0};
  double bytesPerSecond = 0;
  for (int host = 0; host < count(); ++host) {
    if (host == ownHost_) continue;
    const auto line = lineTo(ranks_[host]);
    delay = std::max<std::chrono::duration<double>>(delay, line.delay);
    bytesPerSecond += static_cast<double>(line.bytesPerSecond);
  }
  // Of a tensor of N bytes a rank sends (n - 1) N in one exchange and 2 N (n - 1) / n in two.
  const double more = (count() - 1.0) * (count() - 2.0) / count();
  return static_cast<int64_t>(std::min(delay.count() * bytesPerSecond / more, 1e12));
}

PartOwners::Reduction PartOwners::reductionInto(const at::Tensor& flat, const ReduceOp& op, int64_t incoming) const {
  Reduction reduction;
  for (int host = 0; host < count(); ++host) {
    reduction.scratch.push_back(host == ownHost_ ? nullptr : std::make_shared<Scratch>(incoming, count() - 1));
  }
  reduction.step = [this, flat, op, scratch = reduction.scratch](int64_t beginBytes, int64_t endBytes) {
    const int64_t item = itemSize(flat);
    const int64_t begin = beginBytes / item;
    const int64_t end = std::min(endBytes / item, flat.numel());
    if (begin >= end) return;
    std::vector<const void*> copies;
    for (const auto& theirs : scratch) {
      copies.push_back(theirs ? theirs->at(begin * item)
                              : static_cast<const uint8_t*>(flat.const_data_ptr()) + begin * item);
    }
    reduction::reduceParts(copies, op, contributors_, flat.narrow(0, begin, end - begin));
  };
  return reduction;
}

void PartOwners::allReduceWhole(at::Tensor& flat, const ReduceOp& op, const Wire::Exchanges& also) const {
  const at::Tensor sent = bytesOf(flat);
  const auto reduction = reductionInto(flat, op, sent.numel());
  Wire::Exchanges exchanges;
  for (int step = 1; step < count(); ++step) {
    const int host = hostAfter(step);
    exchanges.push_back(reduction.scratch[host]->from(ranks_[host], sent));
  }
  exchanges.insert(exchanges.end(), also.begin(), also.end());
  exchange(exchanges, {.beforeSending = {}, .afterReceiving = reduction.step});
}

void PartOwners::allReduceInParts(at::Tensor& flat, const ReduceOp& op, const Wire::Exchanges& also) const {
  const Parts parts(flat, count());
  const at::Tensor ownPart = parts[ownHost_];
  const auto reduction = reductionInto(ownPart, op, ownPart.numel() * itemSize(flat));
  // What has been reduced goes where the others' own was.
  Wire::Exchanges exchanges;
  Wire::Exchanges reduced;
  for (int step = 1; step < count(); ++step) {
    const int host = hostAfter(step);
    exchanges.push_back(reduction.scratch[host]->from(ranks_[host], bytesOf(parts[host])));
    reduced.push_back({ranks_[host], bytesOf(ownPart), bytesOf(parts[host])});
  }
  exchanges.insert(exchanges.end(), also.begin(), also.end());
  exchange(exchanges, {.beforeSending = {}, .afterReceiving = reduction.step}, reduced);
}

void PartOwners::reduceTo(int host, at::Tensor& flat, const ReduceOp& op) const {
  const at::Tensor sent = bytesOf(flat);
  if (host != ownHost_) return exchange({{ranks_[host], sent, Wire::nothing()}});
  const auto reduction = reductionInto(flat, op, sent.numel());
  Wire::Exchanges exchanges;
  for (int from = 0; from < count(); ++from) {
    if (from != ownHost_) exchanges.push_back(reduction.scratch[from]->from(ranks_[from], Wire::nothing()));
  }
  exchange(exchanges, {.beforeSending = {}, .afterReceiving = reduction.step});
}

void PartOwners::broadcastFrom(int host, at::Tensor& bytes) const {
  if (count() == 2 || bytes.numel() < kScatteredBroadcastBytes) return broadcastWhole(host, bytes);
  broadcastInParts(host, bytes);
}

void PartOwners::broadcastWhole(int host, at::Tensor& bytes) const {
  if (host != ownHost_) return exchange({{ranks_[host], Wire::nothing(), bytes}});
  Wire::Exchanges exchanges;
  for (int to = 0; to < count(); ++to) {
    if (to != ownHost_) exchanges.push_back({ranks_[to], bytes, Wire::nothing()});
  }
  exchange(exchanges);
}

void PartOwners::broadcastInParts(int host, at::Tensor& bytes) const {
  const bool isRoot = host == ownHost_;
  const Parts parts(bytes, count());
  Wire::Exchanges scatter;
  for (int to = 0; to < count(); ++to) {
    if (isRoot && to != ownHost_) scatter.push_back({ranks_[to], parts[to], Wire::nothing()});
  }
  if (!isRoot) scatter.push_back({ranks_[host], Wire::nothing(), parts[ownHost_]});
  exchange(scatter);
  Wire::Exchanges gather;
  for (int step = 1; step < count(); ++step) {
    const int other = hostAfter(step);
    // The root has everything, and its own part is still to be had.
    if (other == host) {
      gather.push_back({ranks_[host], Wire::nothing(), parts[other]});
    } else {
      gather.push_back({ranks_[other], parts[ownHost_], isRoot ? Wire::nothing() : parts[other]});
    }
  }
  exchange(gather);
}

}  // namespace bagua
