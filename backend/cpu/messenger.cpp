// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/messenger.h"

#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>
#include <c10/util/thread_name.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "backend/operation/tensor_bytes.h"
#include "backend/operation/timeouts.h"

namespace bagua {
namespace {

// Messages that are looked through for those that are over.
constexpr size_t kLeastTransfersToSearch = 16;

void checkTag(const Operation& operation, int tag) {
  TORCH_CHECK_VALUE(tag >= 0 && tag < Messenger::kTags, operation.name, ": a tag must be from 0 to ",
                    Messenger::kTags - 1, ", got ", tag);
}

// This is a std::timed_mutex whose timed lock ThreadSanitizer sees: that of GCC 12 it does not know.
class TimedMutex {
 public:
  void lock() {
    std::unique_lock lock(mutex_);
    unlocked_.wait(lock, [this] { return !isLocked_; });
    isLocked_ = true;
  }

  bool try_lock_for(std::chrono::milliseconds patience) {  // NOLINT(readability-identifier-naming): std::unique_lock's
    std::unique_lock lock(mutex_);
    if (!unlocked_.wait_for(lock, patience, [this] { return !isLocked_; })) return false;
    isLocked_ = true;
    return true;
  }

  void unlock() {
    const std::lock_guard lock(mutex_);
    isLocked_ = false;
    unlocked_.notify_one();
  }

 private:
  std::mutex mutex_;
  std::condition_variable unlocked_;
  bool isLocked_ = false;
};

// A message in flight. The transport completes it only while somebody waits.
class MessageWork final : public c10d::Work {
 public:
  MessageWork(GroupIdentity group, const Operation& operation, c10::intrusive_ptr<c10d::Work> transfer,
              at::Tensor tensor, std::shared_ptr<OperationLog> health)
      : Work(group.rank, operation.type, operation.name, std::vector<at::Tensor>{tensor}),
        group_(std::move(group)),
        operation_(operation),
        transfer_(std::move(transfer)),
        tensor_(std::move(tensor)),
        health_(std::move(health)) {}

  bool isCompleted() override { return c10d::Work::isCompleted() || transfer_->isCompleted(); }

  bool wait(std::chrono::milliseconds timeout) override {
    Operation operation = operation_;
    if (timeout != kNoTimeout) operation.timeout = limitedTimeout(timeout);
    const auto patience = operation.timeout + health_->patience(operation.timeout);
    const auto deadline = std::chrono::steady_clock::now() + patience;
    // One thread waits at a time. Another one may wait for longer than this one, whose timeout fails the group as well.
    std::unique_lock waiter(waitMutex_, std::defer_lock);
    if (timeout == kNoTimeout) {
      waiter.lock();
    } else {
      static_cast<void>(waiter.try_lock_for(patience));
    }
    if (waiter && c10d::Work::isCompleted()) {
      if (exception_) std::rethrow_exception(exception_);
      return true;
    }
    const auto token = health_->begin(operation, OperationLog::Kind::kMessage);
    std::exception_ptr failure;
    try {
      TORCH_CHECK_WITH(DistNetworkError, waiter, "timed out waiting for a message that another thread waits for, too");
      const bool hasArrived = transfer_->wait(timeout == kNoTimeout ? patience : leftUntil(deadline));
      TORCH_CHECK_WITH(DistBackendError, hasArrived, "the message was aborted");
    } catch (...) {
      failure = health_->explain(std::current_exception(), operation);
    }
    health_->end(token, failure == nullptr);
    if (waiter) finish(failure);
    if (failure) std::rethrow_exception(failure);
    return true;
  }

  std::vector<at::Tensor> result() override { return {tensor_}; }
  int sourceRank() const override { return transfer_->sourceRank(); }

  // Needs a thread, because the transport offers no completion callback. Made only for those who ask.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    const std::lock_guard<std::mutex> lock(futureMutex_);
    if (future_) return future_;
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    auto self = c10::intrusive_ptr<MessageWork>::reclaim_copy(this);
    std::thread([self = std::move(self), future = future_] {
      c10::setThreadName("bagua_message");
      try {
        self->wait(kNoTimeout);
        future->markCompleted(c10::IValue(self->result()));
      } catch (...) {
        future->setError(std::current_exception());
      }
    }).detach();
    return future_;
  }

 private:
  const GroupIdentity group_;
  const Operation operation_;
  const c10::intrusive_ptr<c10d::Work> transfer_;
  const at::Tensor tensor_;
  const std::shared_ptr<OperationLog> health_;
  TimedMutex waitMutex_;
  std::mutex futureMutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace

Messenger::Messenger(GroupIdentity group, std::unique_ptr<Messages> messages, std::shared_ptr<OperationLog> health)
    : group_(std::move(group)), messages_(std::move(messages)), health_(std::move(health)) {}

c10::intrusive_ptr<c10d::Work> Messenger::send(const Operation& operation, at::Tensor tensor, int tag) {
  checkTag(operation, tag);
  try {
    auto transfer = messages_->send(bytesOf(tensor), operation.peer, tag);
    return track(operation, std::move(transfer), std::move(tensor));
  } catch (...) {
    std::rethrow_exception(explain(std::current_exception(), operation));
  }
}

c10::intrusive_ptr<c10d::Work> Messenger::receive(const Operation& operation, at::Tensor tensor, int tag) {
  checkTag(operation, tag);
  try {
    auto transfer = messages_->receive(bytesOf(tensor), operation.peer, tag);
    return track(operation, std::move(transfer), std::move(tensor));
  } catch (...) {
    std::rethrow_exception(explain(std::current_exception(), operation));
  }
}

std::exception_ptr Messenger::explain(const std::exception_ptr& error, const Operation& operation) const {
  const auto token = health_->begin(operation, OperationLog::Kind::kMessage);
  auto explained = health_->explain(error, operation);
  health_->end(token, false);
  return explained;
}

c10::intrusive_ptr<c10d::Work> Messenger::track(const Operation& operation, c10::intrusive_ptr<c10d::Work> transfer,
                                                at::Tensor tensor) {
  bool isTooLate = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    // Not at each of many that are under way together.
    if (transfers_.size() >= nextSearch_) {
      std::erase_if(transfers_, [](const auto& old) { return old.expired(); });
      nextSearch_ = std::max(2 * transfers_.size(), kLeastTransfersToSearch);
    }
    transfers_.emplace_back(transfer);
    isTooLate = isAborted_;
  }
  // Posted while the others were being aborted: nobody else would end it.
  if (isTooLate) transfer->abort();
  return c10::make_intrusive<MessageWork>(group_, operation, std::move(transfer), std::move(tensor), health_);
}

void Messenger::abort() {
  std::vector<c10::weak_intrusive_ptr<c10d::Work>> transfers;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    isAborted_ = true;
    transfers.swap(transfers_);
  }
  // All are of Messages, whose abort() marks them and throws nothing.
  for (const auto& weak : transfers) {
    if (const auto transfer = weak.lock()) transfer->abort();
  }
}

}  // namespace bagua
