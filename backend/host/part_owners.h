// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "backend/host/wire.h"
#include "backend/torch_compat.h"

namespace bagua {

class Scratch;

// Up to which size the owners of a part send each other all that they have, which takes one one-way delay, instead of
// reducing a part each and sending that on, which takes two and fewer bytes. The owners agree on it now and then, on
// what the one with the least to spare has seen of its lines; they count the same calls.
class OneExchangeLimit {
 public:
  // Bytes of a tensor.
  [[nodiscard]] int64_t bytes() const { return bytes_; }
  // The next call is one in which they agree.
  [[nodiscard]] bool isDue() const { return calls_ % kCallsBetween == 1; }
  void afterCall() { ++calls_; }
  // What each of them proposes.
  void agree(const std::vector<int64_t>& proposals);

 private:
  // The first call has yet to show what the lines are like.
  static constexpr int kCallsBetween = 32;
  static constexpr int64_t kLeast = int64_t{16} << 10;
  // Each rank keeps as much of every other one.
  static constexpr int64_t kMost = int64_t{4} << 20;
  int64_t bytes_ = kLeast;
  int64_t calls_ = 0;
};

// The ranks that deal with the same part of a tensor, one on each host, and the steps that they take over the network.
// Inside a host nothing happens here. Every one of them makes the same calls with the same sizes. Tensors are flat.
class PartOwners {
 public:
  using ReduceOp = c10d::ReduceOp;
  // See Wire::exchangeInPieces.
  using ExchangeInPieces =
      std::function<void(const Wire::Exchanges& exchanges, const Pipeline& pipeline, const Wire::Exchanges& forwarded)>;
  using LineTo = std::function<Wire::Line(int peer)>;

  // `ranks` in the order of hosts, this rank on `ownHost`. AVG divides by `contributors`: what an owner brings may be
  // the sum of several.
  PartOwners(std::vector<int> ranks, int ownHost, int64_t contributors, ExchangeInPieces exchange);

  // In place, of what each owner holds, in the order of hosts. `limit` is that of these owners.
  void allReduce(at::Tensor& flat, const ReduceOp& op, OneExchangeLimit& limit, const LineTo& lineTo) const;
  // In place on the owner that is on `host`.
  void reduceTo(int host, at::Tensor& flat, const ReduceOp& op) const;
  // From the owner that is on `host`.
  void broadcastFrom(int host, at::Tensor& bytes) const;

 private:
  [[nodiscard]] int count() const { return static_cast<int>(ranks_.size()); }
  // The other hosts in turn, so that not all send to the same one first.
  [[nodiscard]] int hostAfter(int step) const { return (ownHost_ + step) % count(); }
  void exchange(const Wire::Exchanges& exchanges, const Pipeline& pipeline = {},
                const Wire::Exchanges& forwarded = {}) const {
    exchange_(exchanges, pipeline, forwarded);
  }
  // What comes from each of the others, and the step of a pipeline that reduces it with `flat`, in the order of hosts.
  struct Reduction {
    // By host; null for this one.
    std::vector<std::shared_ptr<Scratch>> scratch;
    Pipeline::Step step;
  };
  [[nodiscard]] Reduction reductionInto(const at::Tensor& flat, const ReduceOp& op, int64_t incoming) const;
  // `also` goes along.
  void allReduceWhole(at::Tensor& flat, const ReduceOp& op, const Wire::Exchanges& also = {}) const;
  void allReduceInParts(at::Tensor& flat, const ReduceOp& op, const Wire::Exchanges& also) const;
  // Up to which size a second delay costs this rank more than the bytes that it spares.
  [[nodiscard]] int64_t proposedLimit(const LineTo& lineTo) const;
  void broadcastWhole(int host, at::Tensor& bytes) const;
  void broadcastInParts(int host, at::Tensor& bytes) const;

  const std::vector<int> ranks_;
  const int ownHost_;
  const int64_t contributors_;
  const ExchangeInPieces exchange_;
};

}  // namespace bagua
