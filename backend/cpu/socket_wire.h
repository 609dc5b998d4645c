// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "backend/cpu/wire.h"
#include "backend/net/transport.h"

namespace bagua {

// Messages over our own transport. A call costs one one-way delay, as nothing goes ahead of the data: the first message
// from one rank to another in a program (or since compareAgain()) carries the sender's program and both sizes, and its
// payload is written to its place only where they fit. Several wires of one group work at the same time, for programs
// with different sequence numbers.
class SocketWire final : public Wire {
 public:
  explicit SocketWire(std::shared_ptr<net::Group> group);

  void setProgram(const ProgramFingerprint& program) override;
  void compareAgain() override { isCompared_.assign(isCompared_.size(), false); }
  void refuse(int refusing) override { refusing_ = refusing; }
  void exchangeInPieces(const Exchanges& exchanges, const Pipeline& pipeline, const Exchanges& forwarded,
                        Deadline deadline) override;
  [[nodiscard]] Line lineTo(int peer) override;
  // All wires of the group leave it.
  void abort() override;

 private:
  class Call;

  const std::shared_ptr<net::Group> group_;
  const std::shared_ptr<net::Signal> signal_ = std::make_shared<net::Signal>();
  bool isInProgram_ = false;
  ProgramFingerprint program_;
  int refusing_ = -1;
  // Messages of this program so far, by peer.
  std::vector<uint32_t> sent_;
  std::vector<uint32_t> received_;
  // By peer.
  std::vector<bool> isCompared_;
  std::atomic<bool> isAborted_ = false;
};

}  // namespace bagua
