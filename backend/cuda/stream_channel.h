// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAStream.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "backend/cuda/device_clock.h"
#include "backend/cuda/nccl_communicator.h"
#include "backend/cuda/watchdog.h"
#include "backend/cuda/work_cuda.h"

namespace bagua {

// Whether the current stream of `device` is recorded into a CUDA graph.
[[nodiscard]] bool isCapturingOn(at::Device device);

// A channel of programs on CUDA tensors: one communicator with the one stream that its calls are enqueued on.
class StreamChannel {
 public:
  // `owned` is `communicator` if that is ours to watch and to end; null where it goes over a backend of somebody else.
  StreamChannel(std::unique_ptr<Communicator> communicator, NcclCommunicator* owned, at::Device device,
                bool isHighPriority);

  // Hold it while enqueueing: what it orders is the same on every rank.
  [[nodiscard]] std::mutex& order() { return order_; }
  [[nodiscard]] Communicator& communicator() { return *communicator_; }
  [[nodiscard]] NcclCommunicator* owned() { return owned_; }

  // Behind all that has been enqueued here by now; nothing where that is nothing.
  [[nodiscard]] std::optional<at::cuda::CUDAEvent> behindAll() const;

  // Enqueues a program behind what the caller's current stream holds by now, and behind `after`. Returns what the
  // program threw when ranks may be out of step; throws on what left no trace at the other ranks.
  [[nodiscard]] std::exception_ptr enqueue(WorkCuda& work, Program program, std::vector<at::cuda::CUDAEvent> after);

 private:
  [[nodiscard]] uint64_t calls() const { return owned_ == nullptr ? 0 : owned_->calls(); }
  void openStream(const c10::cuda::CUDAStream& producer, std::vector<at::cuda::CUDAEvent>& after);

  const std::unique_ptr<Communicator> communicator_;
  NcclCommunicator* const owned_;
  const at::Device device_;
  const bool isHighPriority_;
  std::mutex order_;
  // Made by the first program.
  std::optional<c10::cuda::CUDAStream> stream_;
  at::cuda::CUDAEvent ready_;
  DeviceClock clock_;
};

// The channels of one executor.
class ChannelSet final : public WatchedTransport {
 public:
  // `prepareThread` runs first in each thread that aborts a channel.
  explicit ChannelSet(std::function<void()> prepareThread) : prepareThread_(std::move(prepareThread)) {}

  // Channels are closed in ascending order of `position`, which must lead no two ranks to wait for each other.
  void add(int position, std::shared_ptr<StreamChannel> channel);
  // From now on abort() leaves communicators alone that belong to somebody else.
  void dropBorrowed();
  void close(std::chrono::steady_clock::time_point deadline);

  [[nodiscard]] std::string asyncError() override;
  void abort() override;

 private:
  [[nodiscard]] std::vector<std::shared_ptr<StreamChannel>> channels();

  const std::function<void()> prepareThread_;
  std::mutex mutex_;
  std::map<int, std::shared_ptr<StreamChannel>> channels_;
  bool isAborted_ = false;
};

}  // namespace bagua
