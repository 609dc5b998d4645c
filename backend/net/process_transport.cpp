// SPDX-License-Identifier: Apache-2.0
#include "backend/net/process_transport.h"

#include <c10/util/Exception.h>

#include <cstdlib>
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

// Never destroyed: groups may be left behind at the end of the process, when the order of destruction is anybody's. The
// kernel closes the connections.
struct OfProcess {
  ForkHeldMutex mutex;
  std::optional<Kept> kept;
};

OfProcess& ofProcess() {
  static auto* const made = new OfProcess;  // NOLINT(cppcoreguidelines-owning-memory)
  return *made;
}

// At the end of the process, which a forked child has inherited.
void finishSending() {
  std::shared_ptr<Transport> transport;
  {
    auto& process = ofProcess();
    const std::lock_guard lock(process.mutex);
    if (process.kept && !process.kept->mark.isFromParent()) transport = process.kept->transport;
  }
  if (!transport) return;
  transport->finish();
  transport->halt();
}

}  // namespace

std::shared_ptr<Transport> newTransport(config::PortRange ports) {
  const auto security = jobSecurity();
  return Transport::listenAt(localAddress(), config::socketConnections(), security ? security->encryption() : nullptr,
                             kPatienceWithSilence, ports);
}

std::shared_ptr<Transport> processTransport() {
  auto& [mutex, kept] = ofProcess();
  const std::lock_guard lock(mutex);
  // The parent's threads are not here.
  if (kept && kept->mark.isFromParent()) neverDestroy(std::move(kept->transport));
  if (!kept || kept->mark.isFromParent()) {
    kept.reset();
    kept.emplace(Kept{.mark = {}, .transport = newTransport()});
    static const int registered = std::atexit(&finishSending);
    TORCH_INTERNAL_ASSERT(registered == 0);
  }
  return kept->transport;
}

}  // namespace bagua::net
