// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "backend/health/group_health.h"
#include "backend/message_executor.h"
#include "backend/rendezvous/rank_record.h"

namespace bagua {

// The executor for CPU tensors of a group whose ranks are `members`. `isSerial`: its programs never run together, so
// that one thread does, which holds memory for one.
std::shared_ptr<MessageExecutor> makeCpuExecutor(const GroupIdentity& group, const GroupMembers& members,
                                                 const std::shared_ptr<const HostTopology>& topology,
                                                 GroupHealth& health, bool isSerial);

// Has a failure of the group end the executor too.
void endWithGroup(const std::shared_ptr<Executor>& executor, OperationLog& log);

}  // namespace bagua
