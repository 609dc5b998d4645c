// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "backend/communicator.h"
#include "backend/cpu/collectives/reduction.h"
#include "backend/cpu/shared_memory/meeting_room.h"
#include "backend/cpu/wire.h"

namespace bagua {

// The collectives of the ranks of one host, through memory that they share. Ranks count from 0 in the order of
// `members`, which are all that this class knows. Tensors are cut into pieces that stay in cache; results are the same
// bits on all ranks. Used by one thread.
class SharedMemoryExchange {
 public:
  using Deadline = std::chrono::steady_clock::time_point;
  // Elements of a flat tensor.
  struct Span {
    int64_t begin = 0;
    int64_t length = 0;
  };

  // Collective over `members`, ascending ranks of `wire` on one host, this one among them. Null on all of them unless
  // every one can map the memory; then `whyNot` is the reason, where this rank knows it.
  static std::unique_ptr<SharedMemoryExchange> make(Wire& wire, const std::vector<int>& members, Deadline deadline,
                                                    std::string& whyNot);

  explicit SharedMemoryExchange(std::unique_ptr<MeetingRoom> room) : room_(std::move(room)) {}

  [[nodiscard]] int rank() const { return room_->rank(); }
  [[nodiscard]] int size() const { return room_->size(); }

  // Bytes. `tensor` is the root's afterwards.
  void broadcast(at::Tensor& tensor, int root, Deadline deadline);
  // Bytes for and from every rank.
  void allToAll(const std::vector<at::Tensor>& received, const std::vector<at::Tensor>& sent, Deadline deadline);
  // Every rank holds its own span of `tensor`, and afterwards all spans.
  void gather(at::Tensor& tensor, const std::vector<Span>& spans, Deadline deadline);
  void barrier(Deadline deadline) { room_->meet(deadline); }

  // Flat tensors; `prepared` is what reduction::prepare makes of the input. AVG divides by `contributors`.
  void allReduce(at::Tensor& flat, const at::Tensor& prepared, const c10d::ReduceOp& op, Deadline deadline);
  void reduce(at::Tensor& flat, const at::Tensor& prepared, int root, const c10d::ReduceOp& op, Deadline deadline);
  // Every rank receives the reduction of its own span, in `output`, which may lie in `prepared`.
  void reduceSpans(at::Tensor& output, const at::Tensor& prepared, const std::vector<Span>& spans,
                   const c10d::ReduceOp& op, int64_t contributors, Deadline deadline);

  // See MeetingRoom.
  void setProgram(const ProgramFingerprint& program) { room_->setProgram(program); }
  void abort() { room_->abort(); }

 private:
  // Into a slot of this rank, for the others. Ranks that take turns on a core find it in that core's cache.
  void show(uint8_t* to, const void* from, int64_t bytes) const;
  // Where the contributions of all ranks to a piece lie: this rank's own at `own`, the others' `offset` bytes into what
  // they have shown.
  [[nodiscard]] std::vector<const void*> contributions(const void* own, int64_t offset) const;
  using Elements = reduction::Elements;
  void allReduceInOneStep(const Elements& piece, const uint8_t* prepared, const c10d::ReduceOp& op, Deadline deadline);
  void allReduceInTwoSteps(const Elements& piece, const uint8_t* prepared, const c10d::ReduceOp& op, Deadline deadline);

  const std::unique_ptr<MeetingRoom> room_;
};

}  // namespace bagua
