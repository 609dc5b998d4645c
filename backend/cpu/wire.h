// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <vector>

#include "backend/communicator.h"
#include "backend/operation/program_fingerprint.h"

namespace bagua {

// Throws a MismatchError unless rank `sender` sends rank `receiver` as many bytes as that expects. It names elements of
// `item` bytes; bytes, where that is 0.
void checkSameSize(int sender, int64_t sent, int receiver, int64_t expected, int64_t item);

// Moves bytes between ranks. Used by one thread, but for abort(). SocketWire does; tests of the collectives have dozens
// of ranks in one process instead, over lines of their choice.
class Wire {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  // What goes to and what comes from one rank, as flat tensors of bytes; either may be empty. With this rank itself:
  // a copy.
  struct Exchange {
    int peer;
    at::Tensor sent;
    at::Tensor received;
    // How many bytes come, where `received` is smaller: it is filled again and again, byte i at i % received.numel(),
    // which is a whole number of pieces. Only with a pipeline, which uses them meanwhile.
    int64_t incoming = kWhatIsReceived;
    // No step of the pipeline changes what is sent. Otherwise what the peer has not acknowledged is copied before.
    bool isKept = false;

    static constexpr int64_t kWhatIsReceived = -1;
    [[nodiscard]] int64_t incomingBytes() const { return incoming == kWhatIsReceived ? received.numel() : incoming; }
  };
  using Exchanges = std::vector<Exchange>;
  // What goes through the steps of a pipeline together, of every exchange.
  static constexpr int64_t kPieceBytes = int64_t{256} << 10;
  // What an Exchange sends, or receives, that only does the other.
  static at::Tensor nothing();

  Wire(int rank, int size) : rank_(rank), size_(size) {}
  virtual ~Wire() = default;
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return size_; }

  // What the exchanges from now on belong to. Two ranks that exchange anything find out that they are in different
  // programs, or expect other sizes of each other: a MismatchError then, before a byte is used.
  virtual void setProgram(const ProgramFingerprint& program) = 0;
  // Has the next exchange with each rank compare sizes, though there was one in this program already.
  virtual void compareAgain() = 0;
  // Has the next exchange, of this program and on every rank that takes part in it, throw a RefusedError that names
  // rank `refusing`.
  virtual void refuse(int refusing) = 0;

  // Returns when all have been sent and received. Two ranks that exchange several things name them in the same order,
  // with the same sizes; each names the other, also where it only sends, or only receives.
  void exchange(const Exchanges& exchanges, Deadline deadline) { exchangeInPieces(exchanges, {}, {}, deadline); }
  // Sends `said` to each of `peers` and returns what came from each, as many bytes, in their order. All of them hear
  // each other directly: where one has died, all find out.
  std::vector<at::Tensor> tellEach(const std::vector<int>& peers, const at::Tensor& said, Deadline deadline);
  // A step that is not set is not taken. A piece of `forwarded` is exchanged once that piece of `exchanges` has come
  // and gone and been used: it may send what came of that, and be received where that was sent from.
  virtual void exchangeInPieces(const Exchanges& exchanges, const Pipeline& pipeline, const Exchanges& forwarded,
                                Deadline deadline) = 0;
  // The way to a peer, as far as it is known; zeros: not at all.
  struct Line {
    // How long a byte is on its way.
    std::chrono::microseconds delay{0};
    int64_t bytesPerSecond = 0;
  };
  [[nodiscard]] virtual Line lineTo(int peer) = 0;
  // Has exchange() throw, also one that is under way. From any thread.
  virtual void abort() = 0;

 private:
  const int rank_;
  const int size_;
};

}  // namespace bagua
