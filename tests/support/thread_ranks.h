// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "backend/communicator.h"
#include "backend/cpu/wire.h"

namespace bagua::testing {

// Runs `body` once per rank, each on a thread of its own with a CpuCommunicator over an in-process network. Returns
// when all have; rethrows the error of the rank that failed first, and wakes the ranks that wait for it.
// `hosts` names the host of each rank; empty: all on one. `lines` is what the ranks take the way to a peer for.
void runRanks(int size, const std::function<void(Communicator&)>& body, std::vector<std::string> hosts = {},
              const std::function<Wire::Line(int rank, int peer)>& lines = {});

// The same over our own transport, one for each rank, as in a process of its own.
void runRanksOverSockets(const std::function<void(Communicator&)>& body, const std::vector<std::string>& hosts);

}  // namespace bagua::testing
