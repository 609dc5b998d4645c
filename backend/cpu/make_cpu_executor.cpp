// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/make_cpu_executor.h"

#include <c10/util/Exception.h>

#include <string>
#include <utility>
#include <vector>

#include "backend/config.h"
#include "backend/cpu/collectives/cpu_communicator.h"
#include "backend/cpu/cpu_executor.h"
#include "backend/cpu/gloo/backend_messages.h"
#include "backend/cpu/gloo/backend_wire.h"
#include "backend/cpu/gloo/peer_watch.h"
#include "backend/cpu/socket_messages.h"
#include "backend/cpu/socket_wire.h"
#include "backend/net/process_transport.h"

namespace bagua {
namespace {

// Between hosts, programs are under way together: while one is coded, or waits for what is on its way, the line belongs
// to the others, and a small one costs no delay of its own. A thread is started with a channel's first program. (With
// Gloo a step of bytegrad at 1 Gbit/s took 149 ms with one channel, 136 with two, 134 with three and 136 with four.)
// Each channel needs shared memory of its own where hosts have several ranks. Inside a host the processor is never
// idle.
constexpr int kChannelsBetweenRanks = 16;
constexpr int kChannelsBetweenHosts = 2;

int channelsFor(const HostTopology& topology) {
  if (topology.hostCount() == 1) return 1;
  const bool isShared = topology.maxRanksPerHost() > 1 || config::hostTransport() == config::HostTransport::kGloo;
  return isShared ? kChannelsBetweenHosts : kChannelsBetweenRanks;
}

std::vector<net::ProcessAddress> addressesOf(const GroupMembers& members) {
  std::vector<net::ProcessAddress> addresses;
  for (size_t rank = 0; rank < members.addresses.size(); ++rank) {
    const std::string& text = members.addresses[rank];
    TORCH_CHECK_WITH(DistNetworkError, !text.starts_with("none: "), "bagua: rank ", rank,
                     " cannot be reached by the others: ", text.substr(6));
    addresses.push_back(net::ProcessAddress::parse(text));
  }
  return addresses;
}

// What carries the bytes of a group between its processes.
struct Carriers {
  std::function<std::unique_ptr<Wire>(int channel)> makeWire;
  std::unique_ptr<MessageTransport> messages;
  OperationLog::FindLost findLost;
};

Carriers socketCarriers(const GroupIdentity& group, const GroupMembers& members, const HostTopology& topology) {
  const auto& neighbours = topology.ranksOf(topology.hostOf(group.rank));
  const auto transport = members.ownTransport ? members.ownTransport : net::processTransport();
  const auto joined = transport->join(members.id, group.rank, addressesOf(members), neighbours);
  return {.makeWire = [joined](int) { return std::make_unique<SocketWire>(joined); },
          .messages = std::make_unique<SocketMessages>(joined),
          .findLost =
              [weak = std::weak_ptr<net::Group>(joined)] {
                const auto present = weak.lock();
                return present ? present->findLost() : std::nullopt;
              }};
}

Carriers backendCarriers(const c10::intrusive_ptr<c10d::Backend>& backend, const HostTopology& topology) {
  const auto watch = topology.hostCount() > 1 ? std::make_shared<PeerWatch>(backend) : nullptr;
  return {.makeWire = [backend, watch](int channel) { return std::make_unique<BackendWire>(backend, channel, watch); },
          .messages = std::make_unique<BackendMessages>(backend),
          .findLost =
              [weak = std::weak_ptr<PeerWatch>(watch)] {
                const auto present = weak.lock();
                return present ? present->findLost() : std::nullopt;
              }};
}

}  // namespace

void endWithGroup(const std::shared_ptr<Executor>& executor, OperationLog& log) {
  log.onFailure([weak = std::weak_ptr<Executor>(executor)](const std::string& cause) {
    if (const auto failing = weak.lock()) failing->abort(cause);
  });
}

std::shared_ptr<Executor> makeCpuExecutor(const GroupIdentity& group, const GroupMembers& members,
                                          const std::shared_ptr<const HostTopology>& topology,
                                          const MakeHostBackend& makeBackend, GroupHealth& health, bool isSerial) {
  const bool isGloo = config::hostTransport() == config::HostTransport::kGloo;
  auto carriers = isGloo ? backendCarriers(makeBackend(), *topology) : socketCarriers(group, members, *topology);
  const auto log = health.addLog("cpu");
  // Memory that the ranks of one host share tells them of a death by itself.
  if (topology->hostCount() > 1) log->watchPeers(carriers.findLost);
  CpuExecutor::Communicators channels;
  const int count = isSerial ? 1 : channelsFor(*topology);
  for (int channel = 0; channel < count; ++channel) {
    channels.push_back(std::make_unique<CpuCommunicator>(carriers.makeWire(channel), topology));
  }
  auto messenger = std::make_unique<Messenger>(group, std::move(carriers.messages), log);
  auto executor = std::make_shared<CpuExecutor>(group, std::move(channels), std::move(messenger), log);
  endWithGroup(executor, *log);
  return executor;
}

}  // namespace bagua
