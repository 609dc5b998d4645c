// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/device_clock.h"

#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <utility>

namespace bagua {
namespace {

class CudaEvent final : public DeviceEvent {
 public:
  CudaEvent(c10::Device device, cudaEvent_t event) : device_(device), event_(event) {}
  // Where the process ends the driver may have gone before.
  ~CudaEvent() override { static_cast<void>(succeeds(cudaEventDestroy(event_))); }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  [[nodiscard]] bool record() override {
    return succeeds(cudaEventRecord(event_, c10::cuda::getCurrentCUDAStream(device_.index()).stream()));
  }
  [[nodiscard]] bool hasCome() const override {
    const c10::cuda::CUDAGuard onDevice(device_.index());
    // Whoever asks may be capturing a graph, which a question about other work would end.
    const c10::cuda::CUDAStreamCaptureModeGuard anyMode(cudaStreamCaptureModeRelaxed);
    return succeeds(cudaEventQuery(event_));
  }
  [[nodiscard]] double secondsSince(const DeviceMoment& earlier) const override {
    const c10::cuda::CUDAGuard onDevice(device_.index());
    const c10::cuda::CUDAStreamCaptureModeGuard anyMode(cudaStreamCaptureModeRelaxed);
    float milliseconds = 0;
    // What cannot be told adds nothing.
    if (!succeeds(cudaEventElapsedTime(&milliseconds, dynamic_cast<const CudaEvent&>(earlier).event_, event_)))
      return 0;
    return milliseconds / 1e3;
  }

  // Leaves no error behind that the next call of somebody else would find.
  static bool succeeds(cudaError_t result) {
    if (result != cudaSuccess) static_cast<void>(cudaGetLastError());
    return result == cudaSuccess;
  }

 private:
  const c10::Device device_;
  cudaEvent_t const event_;
};

}  // namespace

DeviceClock::DeviceClock(MakeEvent makeEvent) : makeEvent_(std::move(makeEvent)) {}

std::optional<Moment> DeviceClock::now() {
  std::unique_ptr<DeviceEvent> event;
  {
    const std::lock_guard<std::mutex> lock(pool_->mutex);
    if (!pool_->free.empty()) {
      event = std::move(pool_->free.back());
      pool_->free.pop_back();
    }
  }
  if (!event) event = makeEvent_();
  if (!event || !event->record()) return std::nullopt;
  {
    const std::lock_guard<std::mutex> lock(pool_->mutex);
    ++pool_->inUse;
  }
  const auto giveBack = [pool = pool_](DeviceEvent* used) {
    std::unique_ptr<DeviceEvent> owned(used);
    const std::lock_guard<std::mutex> lock(pool->mutex);
    --pool->inUse;
    pool->free.push_back(std::move(owned));
  };
  return Moment{.onCpu = {}, .onDevice = std::shared_ptr<DeviceEvent>(event.release(), giveBack)};
}

bool DeviceClock::hasRoom() const {
  const std::lock_guard<std::mutex> lock(pool_->mutex);
  return pool_->inUse < kMostMoments;
}

std::unique_ptr<DeviceEvent> makeCudaEvent(c10::Device device) {
  cudaEvent_t event = nullptr;
  if (!CudaEvent::succeeds(cudaEventCreateWithFlags(&event, cudaEventDefault))) return nullptr;
  return std::make_unique<CudaEvent>(device, event);
}

}  // namespace bagua
