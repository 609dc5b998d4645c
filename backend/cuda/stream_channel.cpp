// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/stream_channel.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include <utility>

#include "backend/cuda/run_together.h"
#include "backend/operation/program_mode.h"

namespace bagua {

bool isCapturingOn(at::Device device) {
  // The default streams of all devices have one handle, for which CUDA answers as for the current device.
  const c10::cuda::CUDAGuard onDevice(device.index());
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(device.index()), &status));
  return status != cudaStreamCaptureStatusNone;
}

StreamChannel::StreamChannel(std::unique_ptr<Communicator> communicator, NcclCommunicator* owned, at::Device device,
                             bool isHighPriority)
    : communicator_(std::move(communicator)),
      owned_(owned),
      device_(device),
      isHighPriority_(isHighPriority),
      clock_([device] { return makeCudaEvent(device); }) {}

void StreamChannel::openStream(const c10::cuda::CUDAStream& producer, std::vector<at::cuda::CUDAEvent>& after) {
  if (!stream_) stream_ = c10::cuda::getStreamFromPool(isHighPriority_, device_.index());
  ready_.record(producer);
  ready_.block(*stream_);
  for (auto& event : after) event.block(*stream_);
}

std::optional<at::cuda::CUDAEvent> StreamChannel::behindAll() const {
  if (!stream_) return std::nullopt;
  at::cuda::CUDAEvent event;
  event.record(*stream_);
  return event;
}

std::exception_ptr StreamChannel::enqueue(WorkCuda& work, Program program, std::vector<at::cuda::CUDAEvent> after) {
  const c10::cuda::CUDAGuard onDevice(device_.index());
  const auto producer = c10::cuda::getCurrentCUDAStream(device_.index());
  openStream(producer, after);
  const bool isCaptured = isCapturingOn(device_);
  if (isCaptured && owned_ != nullptr) owned_->enterGraph();
  const c10::cuda::CUDAStreamGuard onStream(*stream_);
  const ProgramMode mode(work.results());
  // What a graph records happens with each replay, or never.
  const StageClock::Scope timed(isCaptured || !clock_.hasRoom() ? StageClock::none() : clock_);
  communicator_->setDeadline(std::chrono::steady_clock::now() + work.operation().timeout);
  const uint64_t callsBefore = calls();
  std::exception_ptr failure;
  try {
    program(*communicator_);
  } catch (...) {
    if (owned_ != nullptr && calls() == callsBefore) {
      // A mistake of the caller's, who gets his tensors back: with nothing of ours running on them.
      ready_.record(*stream_);
      ready_.block(producer);
      throw;
    }
    failure = std::current_exception();
  }
  try {
    // Also behind a program that failed half way: what it did enqueue still uses its tensors.
    work.enqueued({*stream_, producer, isCaptured, std::move(program)});
  } catch (...) {
    if (!failure) failure = std::current_exception();
  }
  return failure;
}

void ChannelSet::add(int position, std::shared_ptr<StreamChannel> channel) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (isAborted_) channel->communicator().abort();
  channels_.emplace(position, std::move(channel));
}

std::vector<std::shared_ptr<StreamChannel>> ChannelSet::channels() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<StreamChannel>> all;
  all.reserve(channels_.size());
  for (const auto& [position, channel] : channels_) all.push_back(channel);
  return all;
}

void ChannelSet::dropBorrowed() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(channels_, [](const auto& entry) { return entry.second->owned() == nullptr; });
}

void ChannelSet::close(std::chrono::steady_clock::time_point deadline) {
  for (const auto& channel : channels()) {
    if (channel->owned() == nullptr) continue;
    const std::unique_lock<std::mutex> order(channel->order(), std::try_to_lock);
    if (order.owns_lock()) {
      channel->owned()->close(deadline);
    } else {
      channel->communicator().abort();  // a program that still waits for its peers
    }
  }
}

std::string ChannelSet::asyncError() {
  for (const auto& channel : channels()) {
    if (channel->owned() == nullptr) continue;
    std::string error = channel->owned()->asyncError();
    if (!error.empty()) return error;
  }
  return "";
}

void ChannelSet::abort() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    isAborted_ = true;
  }
  // At the same time: an abort frees device memory, which waits for the kernels of all the others.
  std::vector<std::function<void()>> aborts;
  for (const auto& channel : channels()) aborts.emplace_back([channel] { channel->communicator().abort(); });
  runTogether(prepareThread_, aborts);
}

}  // namespace bagua
