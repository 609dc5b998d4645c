// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>

#include "backend/executor.h"
#include "backend/health/group_health.h"
#include "backend/rendezvous/rank_record.h"
#include "backend/torch_compat.h"

namespace bagua {

// What moves the bytes of CPU tensors where BAGUA_HOST_TRANSPORT is "gloo": made when it is needed, on all ranks.
using MakeHostBackend = std::function<c10::intrusive_ptr<c10d::Backend>()>;

// The executor for CPU tensors of a group whose ranks are `members`. `isSerial`: its programs never run together, so
// that one thread does, which holds memory for one.
std::shared_ptr<Executor> makeCpuExecutor(const GroupIdentity& group, const GroupMembers& members,
                                          const std::shared_ptr<const HostTopology>& topology,
                                          const MakeHostBackend& makeBackend, GroupHealth& health, bool isSerial);

// Has a failure of the group end the executor too.
void endWithGroup(const std::shared_ptr<Executor>& executor, OperationLog& log);

}  // namespace bagua
