// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/gloo/peer_watch.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Logging.h>

#include <utility>

#include "backend/operation/operation.h"

namespace bagua {
namespace {

// Of no wire and no user, who counts from 0: see BackendWire.
constexpr int kWatchTag = 0x6261'6774;

}  // namespace

PeerWatch::PeerWatch(c10::intrusive_ptr<c10d::Backend> backend) : backend_(std::move(backend)) {
  for (int peer = 0; peer < backend_->getSize(); ++peer) {
    if (peer == backend_->getRank()) continue;
    std::vector<at::Tensor> place{at::empty({1}, at::kByte)};
    expected_.push_back({peer, backend_->recv(place, peer, kWatchTag)});
  }
}

std::optional<std::string> PeerWatch::findLost() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (lost_) return lost_;
  for (const auto& [peer, farewell] : expected_) {
    // An abort ends the coming wait at once, unless the connection has: no call asks without waiting.
    farewell->abort();
    try {
      farewell->wait(kNoTimeout);
    } catch (...) {
      lost_ = c10::str("rank ", peer, " has gone: its connection has ended, and it had not left the group before (",
                       messageOf(std::current_exception()), ")");
      return lost_;
    }
  }
  return std::nullopt;
}

void PeerWatch::leave() {
  std::vector<Expected> expected;
  const std::lock_guard<std::mutex> lock(mutex_);
  expected.swap(expected_);
  for (const auto& [peer, farewell] : expected) {
    std::vector<at::Tensor> nothing{at::zeros({1}, at::kByte)};
    try {
      sent_.push_back(backend_->send(nothing, peer, kWatchTag));
    } catch (...) {
      // It has left, or died: nobody is there who could misunderstand.
      VLOG(1) << "bagua: no farewell to rank " << peer << ": " << messageOf(std::current_exception());
    }
  }
}

}  // namespace bagua
