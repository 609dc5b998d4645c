// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/work_cuda.h"

#include <ATen/core/jit_type.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/Exception.h>

#include <utility>

#include "backend/operation/timeouts.h"

namespace bagua {
namespace {

using std::chrono::milliseconds;

// How late a thread that waits may notice.
constexpr auto kWaitPoll = std::chrono::microseconds(100);

}  // namespace

WorkCuda::WorkCuda(const GroupIdentity& group, const Operation& operation, at::Device device,
                   std::vector<at::Tensor> results)
    : WatchedWork(group.rank, operation.type, operation.name, operation.inputs.empty() ? results : operation.inputs),
      group_(group),
      device_(device),
      future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                       std::vector<c10::Device>{device})),
      operation_(withoutInputs(operation)),
      results_(std::move(results)) {}

void WorkCuda::describeAs(const Operation& operation, std::vector<at::Tensor> results) {
  const std::lock_guard<std::mutex> lock(mutex_);
  operation_ = withoutInputs(operation);
  results_ = std::move(results);
}

void WorkCuda::enqueued(Enqueued enqueued) {
  done_.record(enqueued.stream);
  const std::lock_guard<std::mutex> lock(mutex_);
  enqueued_.emplace(std::move(enqueued));
}

void WorkCuda::publish() {
  // The profiler's range is that of the enqueueing; the kernels have their own.
  if (recordFunctionEndCallback_) std::exchange(recordFunctionEndCallback_, nullptr)();
  if (const auto error = exception()) {
    future_->setError(error);
    return;
  }
  const c10::cuda::CUDAStreamGuard onStream(enqueued_->stream);
  future_->markCompleted(c10::IValue(results_));
}

void WorkCuda::checkEnqueued() const {
  TORCH_CHECK(enqueued_ || completed_, operation_.name, " on rank ", rank_, ", group '", group_.name,
              "': the coalescing that this operation belongs to has not ended yet");
}

bool WorkCuda::deviceDone() const {
  // A work without an event has nothing on the device.
  return !enqueued_ || enqueued_->isCaptured || done_.query();
}

bool WorkCuda::isCompleted() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (completed_) return true;
    if (!enqueued_) return false;
  }
  return deviceDone();
}

bool WorkCuda::wait(milliseconds timeout) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    checkEnqueued();
    if (exception_) std::rethrow_exception(exception_);
  }
  const auto consumer = c10::cuda::getCurrentCUDAStream(device_.index());
  blockStream(consumer);
  const bool hasLimit = timeout > kNoTimeout;
  if (!isCaptured() && (hasLimit || operation_.type == c10d::OpType::BARRIER)) waitOnCpu(limitedTimeout(timeout));
  // Tensors of the producer's stream may go back to its pool: it has just been made to wait. To any other stream the
  // wait says nothing about them, so there the watchdog lets go when the device is done.
  if (consumer == enqueued_->producer) releaseTensors();
  return true;
}

void WorkCuda::synchronize() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    checkEnqueued();
    if (exception_) std::rethrow_exception(exception_);
  }
  blockStream(c10::cuda::getCurrentCUDAStream(device_.index()));
}

void WorkCuda::blockStream(const c10::cuda::CUDAStream& consumer) { done_.block(consumer); }

void WorkCuda::waitOnCpu(milliseconds timeout) {
  const auto start = std::chrono::steady_clock::now();
  std::unique_lock<std::mutex> lock(mutex_);
  while (!completed_) {
    // Not under the lock: a query may wait for the driver, and fail() must not wait for it.
    lock.unlock();
    const bool isDone = deviceDone();
    lock.lock();
    if (isDone || completed_) break;
    TORCH_CHECK_WITH(DistBackendError, timeout <= kNoTimeout || std::chrono::steady_clock::now() - start < timeout,
                     describe(operation_, group_), ": wait() timed out after ", timeout.count(),
                     " ms; the operation goes on until its own timeout of ", operation_.timeout.count(), " ms");
    cv_.wait_for(lock, kWaitPoll);
  }
  if (exception_) std::rethrow_exception(exception_);
}

std::vector<at::Tensor> WorkCuda::result() {
  const std::lock_guard<std::mutex> lock(mutex_);
  checkEnqueued();
  return results_;
}

void WorkCuda::fail(const std::exception_ptr& error) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (completed_) return;
    // Under the lock, so that one failure is the first.
    completed_ = true;
    exception_ = error;
  }
  cv_.notify_all();
}

void WorkCuda::retire() {
  releaseTensors();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    completed_ = true;
  }
  cv_.notify_all();
}

void WorkCuda::releaseTensors() {
  Program released;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (enqueued_) released.swap(enqueued_->program);
}

}  // namespace bagua
