// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "backend/executor.h"
#include "backend/health/group_health.h"
#include "backend/topology.h"

namespace bagua {

// The executor of a group's CPU tensors, whose bytes `backend` (Gloo) moves between hosts. It ends with the group.
std::shared_ptr<Executor> makeHostExecutor(const GroupIdentity& group, const c10::intrusive_ptr<c10d::Backend>& backend,
                                           const std::shared_ptr<const HostTopology>& topology, GroupHealth& health);

// Has the executor abort when its group fails.
void endWithGroup(const std::shared_ptr<Executor>& executor, GroupHealth::Track& track);

}  // namespace bagua
