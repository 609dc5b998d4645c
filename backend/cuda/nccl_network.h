// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nccl.h>

#include <chrono>
#include <optional>
#include <string>

namespace bagua {

// How NCCL is to use an Ethernet between hosts, where the user has not told it himself. What it chooses alone is made
// for fabrics that are as fast as what is inside a host. The first member of a communicator decides for all.
struct NcclTerms {
  // The most CTAs of a kernel, and so the most channels: each occupies a part of the GPU for as long as the network
  // takes. NCCL demands one number on all ranks.
  int maxCtas = NCCL_CONFIG_UNDEF_INT;
  // TCP connections of each channel between two ranks, by the threads that serve them; 0: as NCCL has it. The receiver
  // decides how many it offers, so ranks may differ.
  int socketThreads = 0;
  int socketsPerThread = 0;
};

// What NCCL reads for `name`: the environment, else its files (the one that NCCL_CONF_FILE names, or .nccl.conf in the
// home directory; then /etc/nccl.conf).
std::optional<std::string> ncclSetting(const char* name);

// The name of our own transport among NCCL's networks (NET/bagua), and the library that brings it: backend/nccl_net.
inline constexpr const char* kOwnNet = "bagua";
std::string ownNetPath();

// Whether it carries what goes between hosts: with BAGUA_NCCL_NET=1, and with a job secret, which NCCL's own sockets
// would not keep.
bool usesOwnNet();

// Has NCCL load it: by environment variables that NCCL reads with the first communicator of this process. Throws
// ValueError where that cannot be; where the user has chosen another network, only if ranks are on several hosts.
void loadOwnNet(bool spansHosts);

// Whether plain TCP carries what goes between hosts: not where there is InfiniBand or RoCE, or a plugin.
bool goesOverSockets();

// Whether somebody is to measure the round trip for termsBetweenHosts(): not where the sockets are the user's choice,
// or were chosen before.
bool wantsRoundTrip();

// Of a communicator whose ranks are on several hosts, the longest round trip between which is `roundTrip`.
NcclTerms termsBetweenHosts(std::chrono::microseconds roundTrip);

// Has NCCL take the sockets of the terms: by its environment variables, which it reads with the first communicator of
// this process that goes over sockets. What the user has set stays.
void useSockets(const NcclTerms& terms);

}  // namespace bagua
