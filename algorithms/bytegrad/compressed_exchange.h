// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "algorithms/stage.h"
#include "backend/communicator.h"
#include "backend/host_lanes.h"

namespace bagua::bytegrad {

// Replaces `flat` on every host by the sum over the hosts divided by `divisor`, with 8-bit messages (MinMaxUInt8). The
// lanes this rank owns hold the host's own contribution before the call and the result after it.
//
// Per lane: compress one chunk per host, send each to the host that reduces it; decode the copies in rank order, add,
// divide, compress once more; send the result to the owners of the lane on all hosts; decode. All owners decode the
// same bytes, so all hosts end with the same bits. Two quantisations per element, each off by at most range / 510.
void exchangeBetweenHosts(at::Tensor& flat, const HostLanes& lanes, float divisor, StageSeconds& seconds,
                          Communicator& communicator);

}  // namespace bagua::bytegrad
