// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/make_cpu_executor.h"

#include <c10/util/Exception.h>

#include <string>
#include <utility>
#include <vector>

#include "backend/config.h"
#include "backend/cpu/collectives/cpu_communicator.h"
#include "backend/cpu/cpu_executor.h"
#include "backend/cpu/messages.h"
#include "backend/cpu/socket_wire.h"
#include "backend/net/process_transport.h"

namespace bagua {
namespace {

// Between hosts, programs are under way together: while one is coded, or waits for what is on its way, the line belongs
// to the others, and a small one costs no delay of its own. A thread is started with a channel's first program. Each
// channel needs shared memory of its own where hosts have several ranks. Inside a host the processor is never idle.
constexpr int kChannelsBetweenRanks = 16;
constexpr int kChannelsBetweenHosts = 2;

int channelsFor(const HostTopology& topology) {
  if (topology.hostCount() == 1) return 1;
  return topology.maxRanksPerHost() > 1 ? kChannelsBetweenHosts : kChannelsBetweenRanks;
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

}  // namespace

void endWithGroup(const std::shared_ptr<Executor>& executor, OperationLog& log) {
  log.onFailure([weak = std::weak_ptr<Executor>(executor)](const std::string& cause) {
    if (const auto failing = weak.lock()) failing->abort(cause);
  });
}

std::shared_ptr<MessageExecutor> makeCpuExecutor(const GroupIdentity& group, const GroupMembers& members,
                                                 const std::shared_ptr<const HostTopology>& topology,
                                                 GroupHealth& health, bool isSerial) {
  const auto transport = members.ownTransport ? members.ownTransport : net::processTransport();
  // With whom messages go through memory.
  const auto neighbours =
      config::usesSharedMemory() ? topology->ranksOf(topology->hostOf(group.rank)) : std::vector<int>();
  const auto joined = transport->join(members.id, group.rank, addressesOf(members), neighbours);
  const auto findLost = [weak = std::weak_ptr<net::Group>(joined)] {
    const auto present = weak.lock();
    return present ? present->findLost() : std::nullopt;
  };
  const auto log = health.addLog("cpu", findLost);
  CpuExecutor::Communicators channels;
  const int count = isSerial ? 1 : channelsFor(*topology);
  for (int channel = 0; channel < count; ++channel) {
    channels.push_back(std::make_unique<CpuCommunicator>(std::make_unique<SocketWire>(joined), topology));
  }
  auto messenger = std::make_unique<Messenger>(group, std::make_unique<Messages>(joined), log);
  auto executor = std::make_shared<CpuExecutor>(group, std::move(channels), std::move(messenger), log);
  endWithGroup(executor, *log);
  return executor;
}

}  // namespace bagua
