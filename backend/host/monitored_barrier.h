// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>

#include "backend/host/message_transport.h"

namespace bagua {

// torch.distributed.monitored_barrier: rank 0 hears every other rank and answers it, and says which have not come, the
// first or, with `waitAllRanks`, all. On the calling thread. Every rank has another finding to report, of which none is
// to end the operations of the others: these messages are no operations.
void monitoredBarrier(MessageTransport& messages, int rank, int size, std::chrono::milliseconds timeout,
                      bool waitAllRanks);

}  // namespace bagua
