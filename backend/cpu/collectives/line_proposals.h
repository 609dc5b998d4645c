// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ops/empty_like.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "backend/cpu/collectives/agreed_line.h"
#include "backend/operation/tensor_bytes.h"

namespace bagua {

// What the owners tell each other of their lines, beside the data, in a call in which they are to agree.
class LineProposals {
 public:
  // Empty: they are not.
  explicit LineProposals(const std::optional<AgreedLine::Proposal>& own) : largest_(own) {}

  [[nodiscard]] const std::optional<AgreedLine::Proposal>& largest() const { return largest_; }
  // Along with `exchanges`, in their directions.
  void addTo(Wire::Exchanges& exchanges) {
    if (!largest_) return;
    const at::Tensor sent = bytesOf(at::tensor(at::ArrayRef<int64_t>(*largest_), at::kLong));
    for (size_t data = 0, count = exchanges.size(); data < count; ++data) {
      const auto& exchange = exchanges[data];
      exchanges.push_back({exchange.peer, exchange.sent.numel() > 0 ? sent : Wire::nothing(),
                           exchange.incomingBytes() > 0 ? heard_.emplace_back(at::empty_like(sent)) : Wire::nothing()});
    }
  }
  // Between all owners, whatever else they exchange.
  void addToAll(const std::vector<int>& peers, Wire::Exchanges& exchanges) {
    if (!largest_) return;
    const at::Tensor sent = bytesOf(at::tensor(at::ArrayRef<int64_t>(*largest_), at::kLong));
    for (const int peer : peers) exchanges.push_back({peer, sent, heard_.emplace_back(at::empty_like(sent))});
  }
  void takeHeard() {
    for (const auto& heard : heard_) {
      AgreedLine::Proposal theirs;
      std::memcpy(theirs.data(), heard.const_data_ptr(), sizeof(theirs));
      std::transform(theirs.begin(), theirs.end(), largest_->begin(), largest_->begin(),
                     [](int64_t a, int64_t b) { return std::max(a, b); });
    }
    heard_.clear();
  }

 private:
  std::optional<AgreedLine::Proposal> largest_;
  std::vector<at::Tensor> heard_;
};

}  // namespace bagua
