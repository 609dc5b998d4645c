// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "backend/stage_clock.h"

namespace bagua {

// A moment that can be another one later.
class DeviceEvent : public DeviceMoment {
 public:
  // Behind what the current stream holds by now. Returns whether that was possible.
  [[nodiscard]] virtual bool record() = 0;
};

// Times stages by events of a device, which are used again when nobody needs what they tell. It never throws: a device
// that fails shows in the calls of the program itself.
class DeviceClock final : public StageClock {
 public:
  using MakeEvent = std::function<std::unique_ptr<DeviceEvent>()>;
  // A program is timed as a whole or not at all: it begins while fewer than this many of its moments are in use.
  static constexpr size_t kMostMoments = 4096;

  explicit DeviceClock(MakeEvent makeEvent);

  std::optional<Moment> now() override;
  // Whether another program can be timed.
  [[nodiscard]] bool hasRoom() const;

 private:
  // Shared with the moments, which give their events back to it.
  struct Pool {
    std::mutex mutex;
    std::vector<std::unique_ptr<DeviceEvent>> free;
    size_t inUse = 0;
  };

  const MakeEvent makeEvent_;
  const std::shared_ptr<Pool> pool_ = std::make_shared<Pool>();
};

// CUDA's, of `device`, which is the current one. Null where it makes none.
std::unique_ptr<DeviceEvent> makeCudaEvent(c10::Device device);

}  // namespace bagua
