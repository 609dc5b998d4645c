// SPDX-License-Identifier: Apache-2.0
#include "backend/net/process_transport.h"

#include <mutex>
#include <optional>

#include "backend/config.h"
#include "backend/os/fork_held_mutex.h"
#include "backend/os/local_address.h"
#include "backend/os/process_mark.h"
#include "backend/security/job_security.h"

namespace bagua::net {
namespace {

struct Kept {
  ProcessMark mark;
  std::shared_ptr<Transport> transport;
};

}  // namespace

std::shared_ptr<Transport> newTransport() {
  const auto security = jobSecurity();
  return Transport::listenAt(localAddress(), config::socketConnections(), security ? security->encryption() : nullptr);
}

std::shared_ptr<Transport> processTransport() {
  // Never destroyed: groups may be left behind at the end of the process, when the order of destruction is anybody's.
  // The kernel closes the connections.
  static auto* const mutex = new ForkHeldMutex;         // NOLINT(cppcoreguidelines-owning-memory)
  static auto* const kept = new std::optional<Kept>();  // NOLINT(cppcoreguidelines-owning-memory)
  const std::lock_guard lock(*mutex);
  // The parent's threads are not here.
  if (*kept && (*kept)->mark.isFromParent()) neverDestroy(std::move((*kept)->transport));
  if (!*kept || (*kept)->mark.isFromParent()) {
    kept->reset();
    kept->emplace(Kept{.mark = {}, .transport = newTransport()});
  }
  return (*kept)->transport;
}

}  // namespace bagua::net
