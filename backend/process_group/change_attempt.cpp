// SPDX-License-Identifier: Apache-2.0
#include "backend/process_group/change_attempt.h"

#include <c10/util/Exception.h>
#include <c10/util/thread_name.h>

#include <algorithm>
#include <future>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "backend/operation/timeouts.h"
#include "backend/os/fork_held_mutex.h"
#include "backend/os/process_mark.h"

namespace bagua {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Between two looks into the store, or at the attempt.
constexpr milliseconds kShortestWait{1};
constexpr milliseconds kLongestWait{20};
// How long one try to connect may take, and so its clones' as the epoch goes on: several round trips of a long line.
// One try ends after this time, so that nobody waits long for a member that the others have given up as dead.
constexpr milliseconds kOneTry{3000};
// A thread that is answered ends by itself in this time, with an error that says more, and tells the other members.
constexpr milliseconds kGrace{250};
// A new connection may get an answer that a broken one waits for, but each of those costs a thread.
constexpr size_t kMostGivenUp = 4;

// Threads that were given up, by the address they wait for an answer from. Each holds its mark to its very end.
struct GivenUp {
  ForkHeldMutex mutex;
  std::multimap<std::string, std::weak_ptr<const ProcessMark>> byAddress;

  bool hasRoom(const std::string& address) {
    const std::lock_guard lock(mutex);
    std::erase_if(byAddress, [](const auto& entry) {
      const auto mark = entry.second.lock();
      return !mark || mark->isFromParent();
    });
    return byAddress.count(address) < kMostGivenUp;
  }
  void add(const std::string& address, std::weak_ptr<const ProcessMark> mark) {
    const std::lock_guard lock(mutex);
    byAddress.emplace(address, std::move(mark));
  }
};
// Never destroyed, as a process may end during a change. Made when the library is loaded, as a process may fork, too.
GivenUp& givenUp = *new GivenUp;  // NOLINT(cppcoreguidelines-owning-memory)

}  // namespace

void ChangeAttempt::end(const char* how) {
  const char* none = nullptr;
  ended_.compare_exchange_strong(none, how);
}

void ChangeAttempt::endByCall(const char* how) {
  isByCall_ = true;
  end(how);
}

void ChangeAttempt::check() const {
  const char* const how = ended_;
  TORCH_CHECK_WITH(DistBackendError, how == nullptr, "bagua:reconfigure: the group ", how,
                   " while it waited for other members");
}

ChangeStore::ChangeStore(const std::string& name, const c10::intrusive_ptr<c10d::Store>& store,
                         Clock::time_point deadline, std::shared_ptr<const ChangeAttempt> attempt)
    : PrefixStore(name, store),
      patience_(*store, std::max(leftUntil(deadline), store->getTimeout())),
      attempt_(std::move(attempt)) {}

void ChangeStore::wait(const std::vector<std::string>& keys, const milliseconds& timeout) {
  const auto deadline = Clock::now() + timeout;
  for (milliseconds pause = kShortestWait; !check(keys); pause = std::min(2 * pause, kLongestWait)) {
    attempt_->check();
    // Throws torch's own error.
    if (Clock::now() >= deadline) return PrefixStore::wait(keys, kShortestWait);
    std::this_thread::sleep_for(pause);
  }
}

c10::intrusive_ptr<c10d::Store> connectTo(const MemberHandle& member, Clock::time_point deadline,
                                          const ChangeAttempt& attempt) {
  while (true) {
    attempt.check();
    const auto left = leftUntil(deadline);
    try {
      return member.connect(std::min(left, kOneTry));
    } catch (const c10::DistBackendError&) {
      if (left <= kOneTry) throw;
    }
  }
}

Meeting meetInTime(std::function<Meeting()> meet, const MemberHandle& first, milliseconds timeout,
                   Clock::time_point deadline, ChangeAttempt& attempt) {
  const auto throwIfOver = [&] {
    attempt.check();
    TORCH_CHECK_WITH(DistBackendError, Clock::now() < deadline + kGrace,
                     "bagua:reconfigure: the first member of the new group, ", first.toString(),
                     ", has not answered within ", timeout.count(),
                     " ms. Is its process stopped, or its host cut off?");
  };
  const std::string address = c10::str(first.address, " ", first.port);
  for (; !givenUp.hasRoom(address); std::this_thread::sleep_for(kLongestWait)) throwIfOver();
  std::packaged_task<Meeting()> task(std::move(meet));
  auto met = task.get_future();
  auto mark = std::make_shared<const ProcessMark>();
  const std::weak_ptr<const ProcessMark> running = mark;
  // The mark is captured first, so that it goes last.
  std::thread([mark = std::move(mark), task = std::move(task)]() mutable {
    c10::setThreadName("bagua_change");
    task();
  }).detach();
  const auto hasMet = [&](milliseconds limit) { return met.wait_for(limit) == std::future_status::ready; };
  try {
    while (!hasMet(kLongestWait)) throwIfOver();
  } catch (const c10::DistBackendError&) {
    // From here on the thread does not begin the new epoch. If it just has, so has this member.
    attempt.end("did not hear in time");
    if (!hasMet(kGrace)) {
      givenUp.add(address, running);
      throw;
    }
  }
  return met.get();
}

}  // namespace bagua
