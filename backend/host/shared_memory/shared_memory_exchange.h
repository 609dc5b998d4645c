// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>

#include "backend/communicator.h"
#include "backend/host/shared_memory/meeting_room.h"

namespace bagua {

// The collectives of ranks that share a host, through memory that they share. Tensors are cut into pieces that stay in
// cache; results are the same bits on all ranks. Used by one thread.
class SharedMemoryExchange {
 public:
  using Deadline = std::chrono::steady_clock::time_point;
  using Splits = Communicator::Splits;

  // Collective over `network`, whose ranks are all on one host. Null on all ranks unless every one of them can map the
  // memory; the reason is logged.
  static std::unique_ptr<SharedMemoryExchange> make(Communicator& network, Deadline deadline);

  explicit SharedMemoryExchange(std::unique_ptr<MeetingRoom> room) : room_(std::move(room)) {}

  // Bytes. `tensor` is the root's afterwards.
  void broadcast(at::Tensor& tensor, int root, Deadline deadline);
  void allGather(at::Tensor& output, const at::Tensor& input, Deadline deadline);
  void allToAll(at::Tensor& output, const at::Tensor& input, const Splits& outputSplits, const Splits& inputSplits,
                Deadline deadline);
  void barrier(Deadline deadline) { room_->meet(deadline); }

  // Flat tensors; `prepared` is what reduction::prepare makes of the input.
  void allReduce(at::Tensor& flat, const at::Tensor& prepared, const c10d::ReduceOp& op, Deadline deadline);
  void reduce(at::Tensor& flat, const at::Tensor& prepared, int root, const c10d::ReduceOp& op, Deadline deadline);
  void reduceScatter(at::Tensor& output, const at::Tensor& prepared, const c10d::ReduceOp& op, Deadline deadline);

  // See MeetingRoom.
  void abort() { room_->abort(); }

 private:
  // Elements [begin, begin + length) of the piece that was shown last, reduced over the ranks.
  void reduceShown(const at::Tensor& output, int64_t begin, const c10d::ReduceOp& op) const;
  void allReduceInTwoSteps(at::Tensor& piece, const c10d::ReduceOp& op, Deadline deadline);

  const std::unique_ptr<MeetingRoom> room_;
};

}  // namespace bagua
