// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "backend/communicator.h"

namespace bagua::testing {

// Runs `body` once per rank, each on a thread of its own with a host communicator over an in-process network. Returns
// when all have; rethrows the error of the rank that failed first, and wakes the ranks that wait for it.
// `hosts` names the host of each rank; empty: all on one.
void runRanks(int size, const std::function<void(Communicator&)>& body, std::vector<std::string> hosts = {});

}  // namespace bagua::testing
