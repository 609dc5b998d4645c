// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAStream.h>

#include <optional>
#include <vector>

#include "backend/cuda/watchdog.h"
#include "backend/executor.h"

namespace bagua {

// The handle of one operation on CUDA tensors. wait() makes the current stream wait and returns; the CPU waits only
// where wait() is given a limit, and in a barrier. Life: made, enqueued (once, by its executor), retired or failed.
// All methods but enqueued() and describeAs() may be called from any thread.
class WorkCuda final : public WatchedWork {
 public:
  // What is known once everything is on the communication stream.
  struct Enqueued {
    c10::cuda::CUDAStream stream;
    // The stream that was current for the caller.
    c10::cuda::CUDAStream producer;
    // Recorded into a CUDA graph: nothing runs now, and its event must not be queried.
    bool isCaptured;
    // Holds the tensors that the device is still to use.
    Program program;
  };

  WorkCuda(const GroupIdentity& group, const Operation& operation, at::Device device, std::vector<at::Tensor> results);

  // Of a work that was handed out before its group was complete.
  void describeAs(const Operation& operation, std::vector<at::Tensor> results);
  // Records that the device is done when `enqueued.stream` has come as far as it now goes.
  void enqueued(Enqueued enqueued);
  // Completes the future, whose consumers then wait for the communication stream as it now is, and runs its callbacks:
  // not to be called under a lock that they may take.
  void publish();

  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override;
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  uint64_t getSequencenumber() const override { return operation_.sequence; }

  [[nodiscard]] bool isCaptured() const { return enqueued_ && enqueued_->isCaptured; }
  [[nodiscard]] const Operation& operation() const override { return operation_; }
  // For its executor, until the work is published.
  [[nodiscard]] const std::vector<at::Tensor>& results() const { return results_; }
  [[nodiscard]] bool deviceDone() const override;
  void fail(const std::exception_ptr& error) override;
  void retire() override;

 private:
  void checkEnqueued() const;
  void blockStream(const c10::cuda::CUDAStream& consumer);
  void waitOnCpu(std::chrono::milliseconds timeout);
  void releaseTensors();

  const GroupIdentity group_;
  const at::Device device_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
  // Final once the work is enqueued.
  Operation operation_;
  std::vector<at::Tensor> results_;
  std::optional<Enqueued> enqueued_;
  at::cuda::CUDAEvent done_;
  // Of the base: mutex_ guards the program in enqueued_, completed_ and exception_.
};

}  // namespace bagua
