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

// The ranks that deal with the same part of a tensor, one on each host, and the steps that they take over the network.
// Inside a host nothing happens here. Every one of them makes the same calls with the same sizes. Tensors are flat.
class PartOwners {
 public:
  using ReduceOp = c10d::ReduceOp;
  // See Wire::exchangeInPieces.
  using ExchangeInPieces =
      std::function<void(const Wire::Exchanges& exchanges, const Pipeline& pipeline, const Wire::Exchanges& forwarded)>;

  // `ranks` in the order of hosts, this rank on `ownHost`. AVG divides by `contributors`: what an owner brings may be
  // the sum of several.
  PartOwners(std::vector<int> ranks, int ownHost, int64_t contributors, ExchangeInPieces exchange);

  // In place, of what each owner holds, in the order of hosts.
  void allReduce(at::Tensor& flat, const ReduceOp& op) const;
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
  void allReduceWhole(at::Tensor& flat, const ReduceOp& op) const;
  void allReduceInParts(at::Tensor& flat, const ReduceOp& op) const;
  void broadcastWhole(int host, at::Tensor& bytes) const;
  void broadcastInParts(int host, at::Tensor& bytes) const;

  const std::vector<int> ranks_;
  const int ownHost_;
  const int64_t contributors_;
  const ExchangeInPieces exchange_;
};

}  // namespace bagua
