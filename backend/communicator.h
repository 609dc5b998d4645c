// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "backend/operation/program_fingerprint.h"
#include "backend/topology/topology.h"
#include "backend/torch_compat.h"

namespace bagua {

// Bytes that this rank handed to other ranks, whatever carried them.
struct Traffic {
  int64_t inHostBytes = 0;
  int64_t betweenHostsBytes = 0;

  [[nodiscard]] int64_t sentBytes() const { return inHostBytes + betweenHostsBytes; }
  Traffic& operator+=(const Traffic& other);
  [[nodiscard]] Traffic since(const Traffic& earlier) const;
};

// What a program does with the parts of an exchange, piece by piece, while other pieces are on their way: it makes
// bytes [begin, end) of every part just before they leave, and uses those of every part that have arrived. A part that
// is shorter has fewer. In ascending order, on the program's thread.
struct Pipeline {
  using Step = std::function<void(int64_t begin, int64_t end)>;
  Step beforeSending;
  Step afterReceiving;
};

// What a program may ask of the other ranks: blocking calls on CPU tensors, calls that enqueue on the current stream on
// CUDA tensors. Every rank of the group makes the same calls in the same order. Tensors are dense and are treated as
// flat arrays in memory order; the caller has checked devices, dtypes and sizes.
//
// A Communicator belongs to one Executor and is called from one thread at a time: the one that runs the programs.
class Communicator {
 public:
  using ReduceOp = c10d::ReduceOp;
  // Elements for (or from) each rank, in rank order. Empty: even parts.
  using Splits = std::vector<int64_t>;

  Communicator(int rank, int size, std::shared_ptr<const HostTopology> topology)
      : rank_(rank), size_(size), topology_(std::move(topology)) {}
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return size_; }
  [[nodiscard]] const HostTopology& topology() const { return *topology_; }

  virtual void broadcast(at::Tensor& tensor, int root) = 0;
  // In place. Bitwise identical on all ranks.
  virtual void allReduce(at::Tensor& tensor, const ReduceOp& op) = 0;
  // In place on `root`; elsewhere `tensor` is left alone.
  virtual void reduce(at::Tensor& tensor, int root, const ReduceOp& op) = 0;
  // `output` holds size() times `input`, in rank order.
  virtual void allGather(at::Tensor& output, const at::Tensor& input) = 0;
  // `input` holds size() times `output`; this rank receives the reduction of part rank().
  virtual void reduceScatter(at::Tensor& output, const at::Tensor& input, const ReduceOp& op) = 0;
  // Part j of `input` goes to rank j, part i of `output` comes from rank i. Parts may be empty.
  virtual void allToAll(at::Tensor& output, const at::Tensor& input, const Splits& outputSplits,
                        const Splits& inputSplits) = 0;
  // Among the ranks of each host, all hosts at the same time. `parts`: elements of each rank of this host, in the order
  // of the ranks, which together make up `flat`. Floating-point numbers, in place.
  // This rank's part becomes the sum over the host, which is made in float32 where the numbers have 16 bits, divided by
  // `divisor`. The other parts stay.
  virtual void reduceScatterInHost(at::Tensor& flat, const Splits& parts, int64_t divisor);
  // `flat` becomes what each rank of the host has in its part.
  virtual void allGatherInHost(at::Tensor& flat, const Splits& parts);
  // allGather and allToAll of byte tensors, with a pipeline where the transport has one; elsewhere its steps are taken
  // once, before and after. This rank's part for itself does not travel: what its place in `output` holds is undefined
  // until a step writes it after receiving. Steps are taken up to the end of the longest part of another rank. Of the
  // ranks of one host either all have parts for each other or none has. Where all parts of a rank are of one size, so
  // are those of all ranks.
  virtual void allGatherInPieces(at::Tensor& output, const at::Tensor& input, const Pipeline& pipeline);
  virtual void allToAllInPieces(at::Tensor& output, const at::Tensor& input, const Splits& outputSplits,
                                const Splits& inputSplits, const Pipeline& pipeline);
  // Returns when every rank has entered.
  virtual void barrier() = 0;
  // Has a call in progress throw; callable from any thread.
  virtual void abort() {}

  // All calls made from now on together may take until `deadline`; set by the executor before each program.
  void setDeadline(std::chrono::steady_clock::time_point deadline) { deadline_ = deadline; }
  // What all calls made from now on belong to; set by the executor before each program. A transport that compares it
  // with the peers' throws a MismatchError before it gives anything away.
  virtual void setProgram(const ProgramFingerprint& program) { program_ = program; }
  [[nodiscard]] const ProgramFingerprint& program() const { return program_; }
  [[nodiscard]] const Traffic& traffic() const { return traffic_; }

 protected:
  // This rank's, of the ranks of its host.
  [[nodiscard]] at::Tensor ownPartInHost(const at::Tensor& flat, const Splits& parts) const;
  // In place, numbers of 16 bits in float32, and by a tensor on the device: CUDA multiplies with the reciprocal of a
  // number, which rounds differently.
  static void divide(at::Tensor& tensor, int64_t divisor);
  // What is left until the deadline, at least 1 ms (transports take 0 for "no limit"), and at most what can be added to
  // the present.
  [[nodiscard]] std::chrono::milliseconds remaining() const {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline_ - std::chrono::steady_clock::now());
    constexpr std::chrono::milliseconds kLongest = std::chrono::hours(24 * 365);
    return std::clamp(left, std::chrono::milliseconds(1), kLongest);
  }
  [[nodiscard]] const std::vector<int>& hostRanks() const { return topology_->ranksOf(topology_->hostOf(rank_)); }
  void countSentTo(int peer, int64_t bytes);
  void countSentToEach(int64_t bytes);
  // To all other ranks together, as much to one as to another.
  void countSentEvenly(int64_t bytes);
  // To each rank its part of `input`.
  void countSentParts(const at::Tensor& input, const Splits& splits);
  void countSent(const Traffic& traffic) { traffic_ += traffic; }

 private:
  // By rank of the group: parts[i] where that is the i-th rank of this host, else 0.
  [[nodiscard]] Splits splitsInHost(const Splits& parts) const;

  const int rank_;
  const int size_;
  const std::shared_ptr<const HostTopology> topology_;
  std::chrono::steady_clock::time_point deadline_ = std::chrono::steady_clock::time_point::max();
  ProgramFingerprint program_;
  Traffic traffic_;
};

}  // namespace bagua
