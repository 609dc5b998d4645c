// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/wire.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>

#include "backend/operation/peer_errors.h"

namespace bagua {

void checkSameSize(int sender, int64_t sent, int receiver, int64_t expected, int64_t item) {
  if (sent == expected) return;
  const int64_t unit = std::max<int64_t>(item, 1);
  BAGUA_THROW(MismatchError, "the ranks do not make the same exchange: rank ", sender, " sends ", sent / unit,
              item > 0 ? " elements" : " bytes", " to rank ", receiver, ", which expects ", expected / unit,
              ". Nothing was exchanged between them. The sizes that a rank sends have to be those that the others "
              "expect of it");
}

at::Tensor Wire::nothing() { return at::empty({0}, at::kByte); }

std::vector<at::Tensor> Wire::tellEach(const std::vector<int>& peers, const at::Tensor& said, Deadline deadline) {
  Exchanges exchanges;
  for (const int peer : peers) exchanges.push_back({peer, said, at::empty_like(said)});
  exchange(exchanges, deadline);
  std::vector<at::Tensor> heard;
  for (const auto& exchange : exchanges) heard.push_back(exchange.received);
  return heard;
}

}  // namespace bagua
