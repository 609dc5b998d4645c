// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <optional>

// Forks of a test.
namespace bagua::testing {

// Runs `body` in a process that is then killed, as by a SIGKILL from outside.
template <typename Body>
void inKilledProcess(Body&& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    body();
    ::raise(SIGKILL);
  }
  ::waitpid(child, nullptr, 0);
}

// Runs `body`, which ends with _exit(), in a process that takes itself for process 1, as in a container of its own.
// Returns its exit status; nothing where the system does not let us.
template <typename Body>
std::optional<int> inOwnPidNamespace(Body&& body) {
  constexpr int kNotAllowed = 200;
  const pid_t outer = ::fork();
  if (outer == 0) {
    if (::unshare(CLONE_NEWPID) != 0) ::_exit(kNotAllowed);
    const pid_t inner = ::fork();
    if (inner == 0) body();
    int status = 0;
    ::waitpid(inner, &status, 0);
    ::_exit(WIFEXITED(status) ? WEXITSTATUS(status) : 1);
  }
  int status = 0;
  ::waitpid(outer, &status, 0);
  if (!WIFEXITED(status)) return 1;
  return WEXITSTATUS(status) == kNotAllowed ? std::nullopt : std::optional(WEXITSTATUS(status));
}

}  // namespace bagua::testing
