// SPDX-License-Identifier: Apache-2.0
#include "backend/process_group/work_bagua.h"

#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "backend/operation/timeouts.h"

namespace bagua {

WorkBagua::WorkBagua(int rank, const Operation& operation, std::vector<at::Tensor> results)
    : Work(rank, operation.type, operation.isProfiled ? operation.name : nullptr,
           operation.inputs.empty() ? results : operation.inputs),
      operation_(withoutInputs(operation)),
      results_(std::move(results)) {}

bool WorkBagua::wait(std::chrono::milliseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto isDone = [this] { return completed_; };
  if (timeout == kNoTimeout) {
    cv_.wait(lock, isDone);
  } else {
    TORCH_CHECK_WITH(DistBackendError, cv_.wait_for(lock, limitedTimeout(timeout), isDone), operation_.name, " #",
                     operation_.sequence, " on rank ", rank_, ": wait() timed out after ", timeout.count(),
                     " ms; the operation goes on until its own timeout of ", operation_.timeout.count(), " ms");
  }
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> WorkBagua::getFuture() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (future_) return future_;
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    // complete() finds it.
    if (!completed_) return future_;
  }
  settleFuture();
  return future_;
}

bool WorkBagua::complete(const std::exception_ptr& error) {
  bool isAskedFor = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (completed_) return false;
    isAskedFor = future_ != nullptr;
    // From here on getFuture() settles what it makes.
    completed_ = true;
    exception_ = error;
  }
  // Ends the profiler's range and wakes those who wait.
  finish(error);
  return isAskedFor;
}

void WorkBagua::settleFuture() {
  if (const auto error = exception()) {
    future_->setError(error);
  } else {
    future_->markCompleted(c10::IValue(results_));
  }
}

GroupWork::GroupWork(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> parts)
    : Work(rank, c10d::OpType::COALESCED), parts_(std::move(parts)) {}

bool GroupWork::isCompleted() {
  return std::ranges::all_of(parts_, [](const auto& part) { return part->isCompleted(); });
}

bool GroupWork::isSuccess() const {
  return std::ranges::all_of(parts_, [](const auto& part) { return part->isSuccess(); });
}

std::exception_ptr GroupWork::exception() const {
  for (const auto& part : parts_) {
    if (!part->isSuccess()) return part->exception();
  }
  return nullptr;
}

bool GroupWork::wait(std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + limitedTimeout(timeout);
  for (const auto& part : parts_) part->wait(timeout == kNoTimeout ? kNoTimeout : leftUntil(deadline));
  return true;
}

std::vector<at::Tensor> GroupWork::result() {
  std::vector<at::Tensor> results;
  for (const auto& part : parts_) {
    for (auto& tensor : part->result()) results.push_back(std::move(tensor));
  }
  return results;
}

c10::intrusive_ptr<c10::ivalue::Future> GroupWork::getFuture() {
  c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(
      c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
  for (const auto& part : parts_) futures.push_back(part->getFuture());
  const auto listOfTensors = c10::ListType::create(c10::TensorType::get());
  return c10::collectAll(futures)->then(
      [](c10::ivalue::Future& all) -> c10::IValue {
        c10::List<at::Tensor> tensors;
        for (const c10::IValue& part : all.value().toListRef()) {
          for (const auto& tensor : part.toFuture()->value().toTensorVector()) tensors.push_back(tensor);
        }
        return tensors;
      },
      listOfTensors);
}

}  // namespace bagua
