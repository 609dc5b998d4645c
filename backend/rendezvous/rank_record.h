// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "backend/net/transport.h"
#include "backend/topology/topology.h"

namespace bagua {

// What a rank tells the others of itself when a group is made, before anything else travels: its host, and whatever
// changes the bytes between ranks. Lines of "name=value", which other versions of this package can read too; their
// order and names that a reader does not know mean nothing. A rank whose settings are wrong says so in its record: the
// others need not wait for it.
std::string ownRecord();

// What the records of all ranks say together.
struct GroupMembers {
  HostTopology topology;
  // Where each rank's process can be reached (net::ProcessAddress); or "none: " and the reason.
  std::vector<std::string> addresses;
  // The same on all ranks, and no other group's.
  uint64_t id = 0;
  // Of a rank that shares its process with a lower one of the group: a process has one end of each connection, so that
  // this rank needs a transport for itself. Null: the process's own will do.
  std::shared_ptr<net::Transport> ownTransport = nullptr;
  // Lets go of what peers have sent for a group that this rank has never used. Null: not known to the transport.
  std::shared_ptr<const net::Membership> membership = nullptr;
};

// Throws ValueError unless the records, one per rank, agree; it names the ranks, both values and what to do, and is the
// same on all ranks.
GroupMembers membersOf(const std::vector<std::string>& records);

// The same, as this rank takes part in the group, whose ranks share a store.
GroupMembers membersHere(c10d::Store& store, int rank, const std::vector<std::string>& records);

// Exchanges the records of a new group through its store; throws as membersOf(), or DistBackendError where ranks have
// not come in time. Keys: "host/RANK", "hosts_read", and "thread/RANK" where ranks are threads of one process.
GroupMembers exchangeRecords(c10d::Store& store, int rank, int size, std::chrono::milliseconds timeout);

}  // namespace bagua
