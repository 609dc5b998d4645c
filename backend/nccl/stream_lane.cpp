// SPDX-License-Identifier: Apache-2.0
#include "backend/nccl/stream_lane.h"

#include <ATen/core/grad_mode.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include <utility>

#include "backend/nccl/run_together.h"

namespace bagua {
namespace {

bool isCapturing(const c10::cuda::CUDAStream& stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace

StreamLane::StreamLane(std::unique_ptr<Communicator> communicator, OwnedTransport* owned, at::Device device,
                       bool isHighPriority)
    : communicator_(std::move(communicator)), owned_(owned), device_(device), isHighPriority_(isHighPriority) {}

void StreamLane::openStream(const c10::cuda::CUDAStream& producer, std::vector<at::cuda::CUDAEvent>& after) {
  if (!stream_) stream_ = c10::cuda::getStreamFromPool(isHighPriority_, device_.index());
  ready_.record(producer);
  ready_.block(*stream_);
  for (auto& event : after) event.block(*stream_);
}

std::exception_ptr StreamLane::enqueue(WorkCuda& work, Program program, std::vector<at::cuda::CUDAEvent> after) {
  const c10::cuda::CUDAGuard onDevice(device_.index());
  const auto producer = c10::cuda::getCurrentCUDAStream(device_.index());
  openStream(producer, after);
  const bool isCaptured = isCapturing(producer);
  if (isCaptured && owned_ != nullptr) owned_->enterGraph();
  const c10::cuda::CUDAStreamGuard onStream(*stream_);
  const at::NoGradGuard noGrad;
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

void LaneSet::add(int position, std::shared_ptr<StreamLane> lane) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (isAborted_) lane->communicator().abort();
  lanes_.emplace(position, std::move(lane));
}

std::vector<std::shared_ptr<StreamLane>> LaneSet::lanes() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<StreamLane>> all;
  all.reserve(lanes_.size());
  for (const auto& [position, lane] : lanes_) all.push_back(lane);
  return all;
}

void LaneSet::dropBorrowed() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(lanes_, [](const auto& entry) { return entry.second->owned() == nullptr; });
}

void LaneSet::close(std::chrono::steady_clock::time_point deadline) {
  for (const auto& lane : lanes()) {
    if (lane->owned() == nullptr) continue;
    const std::unique_lock<std::mutex> order(lane->order(), std::try_to_lock);
    if (order.owns_lock()) {
      lane->owned()->close(deadline);
    } else {
      lane->communicator().abort();  // a program that still waits for its peers
    }
  }
}

std::string LaneSet::asyncError() {
  for (const auto& lane : lanes()) {
    if (lane->owned() == nullptr) continue;
    std::string error = lane->owned()->asyncError();
    if (!error.empty()) return error;
  }
  return "";
}

void LaneSet::abort() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    isAborted_ = true;
  }
  // At the same time: an abort frees device memory, which waits for the kernels of all the others.
  std::vector<std::function<void()>> aborts;
  for (const auto& lane : lanes()) aborts.emplace_back([lane] { lane->communicator().abort(); });
  runTogether(prepareThread_, aborts);
}

}  // namespace bagua
