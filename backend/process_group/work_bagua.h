// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "backend/operation/operation.h"
#include "backend/torch_compat.h"

namespace bagua {

// The handle of one operation on CPU tensors. Completed once, by the executor's thread or by an abort; waited for by
// any number of threads.
class WorkBagua final : public c10d::Work {
 public:
  WorkBagua(int rank, const Operation& operation, std::vector<at::Tensor> results);

  // Blocks the calling thread. The operation's own timeout bounds the wait; `timeout` can only shorten it.
  bool wait(std::chrono::milliseconds timeout) override;
  std::vector<at::Tensor> result() override { return results_; }
  const std::vector<at::Tensor>& results() const { return results_; }
  // Made for those who ask. Its callbacks run on a callback thread of the executor.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return operation_.sequence; }

  // Releases those who wait. The first call wins. Returns whether somebody has asked for the future: settleFuture() is
  // then due, on a thread that may run callbacks.
  [[nodiscard]] bool complete(const std::exception_ptr& error = nullptr);
  void settleFuture();

  const Operation& operation() const { return operation_; }

 private:
  const Operation operation_;
  const std::vector<at::Tensor> results_;
  // Guarded by mutex_.
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Completed when all of its parts are.
class GroupWork final : public c10d::Work {
 public:
  GroupWork(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> parts);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout) override;
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  const std::vector<c10::intrusive_ptr<c10d::Work>> parts_;
};

}  // namespace bagua
