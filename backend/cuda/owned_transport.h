// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace bagua {

// What an executor asks of a Communicator that it owns, beyond the calls of programs. A Communicator over somebody
// else's backend has none of it: its owner watches and ends it.
class OwnedTransport {
 public:
  virtual ~OwnedTransport() = default;

  // What has gone wrong since the last call. Empty: nothing. Callable from any thread.
  [[nodiscard]] virtual std::string asyncError() = 0;
  // Collective, after the last program: ends in order, or aborts where the peers do not follow in time.
  virtual void close(std::chrono::steady_clock::time_point deadline) = 0;
  // The calls of the next program are recorded into a CUDA graph.
  virtual void enterGraph() = 0;
  // How many calls have reached the transport. A program that fails before its first has left no rank out of step.
  [[nodiscard]] virtual uint64_t calls() const = 0;
};

}  // namespace bagua
