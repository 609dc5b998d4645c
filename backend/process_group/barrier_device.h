// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace bagua {

// Where a barrier of a group runs. A barrier on a GPU orders what the GPUs do, and needs no connection between CPUs.
// Every rank has to come to the same kind of device, so nothing counts that may differ between ranks: neither messages
// between two of them nor which device is current.
struct BarrierPlaces {
  // The device_ids of the call.
  std::vector<int64_t> deviceIds;
  // The device_id of init_process_group.
  std::optional<c10::Device> bound;
  // Devices on which the group has run programs, all of which every rank takes part in. In ascending order.
  std::vector<c10::Device> used;
  // Where there is none, `deviceIds` are those of CPUs.
  bool hasGpu = false;
};

// A GPU in this order: the first that the caller names, the one that the group is bound to, the first that it has used.
// The CPU where that leaves none: torch prefers it too for a group that serves both, and guesses a GPU only for one
// that serves nothing else.
c10::Device barrierDevice(const BarrierPlaces& places);

}  // namespace bagua
