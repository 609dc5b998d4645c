// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "backend/communicator.h"
#include "backend/topology/host_lanes.h"

namespace bagua {

// The step of a hierarchical exchange between hosts (see HostLanes) where a host has few partners: the owners of each
// lane exchange messages with the owners of the same lane on the `partners` of their host, which are the same on all
// ranks of a host and have this host as a partner. `messages` holds one per owned lane, of one length on all hosts.
// Returns, per owned lane, what each partner sent.
std::vector<std::vector<at::Tensor>> exchangeLanes(const std::vector<at::Tensor>& messages,
                                                   const std::vector<int>& partners, const HostLanes& lanes,
                                                   Communicator& communicator);

}  // namespace bagua
