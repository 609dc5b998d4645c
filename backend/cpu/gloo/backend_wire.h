// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "backend/cpu/gloo/peer_watch.h"
#include "backend/cpu/wire.h"
#include "backend/torch_compat.h"

namespace bagua {

// Messages over any c10d backend that sends CPU tensors (Gloo), cut into pieces of a few hundred KiB of which some are
// under way at a time. Gloo sends a large message at about half the speed of the line when both ends send: 10 MiB each
// way between two hosts at 1 Gbit/s took 154 to 172 ms in one piece and 88 ms in pieces (84 ms are possible).
class BackendWire final : public Wire {
 public:
  // Wires of one backend with different `channel`s do not hear each other's messages. An abort leaves `watch`, if
  // there is one.
  BackendWire(c10::intrusive_ptr<c10d::Backend> backend, int channel, std::shared_ptr<PeerWatch> watch);

  void exchangeInPieces(const Exchanges& exchanges, const Pipeline& pipeline, const Exchanges& forwarded,
                        Deadline deadline) override;
  void abort() override;

 private:
  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

  // Starts the transfer of one piece of every exchange.
  Works start(const Exchanges& exchanges, int64_t piece);
  void finish(const Works& works, Deadline deadline);
  void checkNotAborted() const;

  const c10::intrusive_ptr<c10d::Backend> backend_;
  const int tag_;
  const std::shared_ptr<PeerWatch> watch_;
  mutable std::mutex mutex_;
  // What abort() has to end.
  Works underWay_;
  bool isAborted_ = false;
};

}  // namespace bagua
