// SPDX-License-Identifier: Apache-2.0
#include "backend/process_group/change_attempt.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "backend/security/sealed_store.h"

namespace bagua {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Between two looks into the store.
constexpr milliseconds kShortestPause{1};
constexpr milliseconds kLongestPause{20};
// How long one try to connect may take, which nothing can interrupt: several round trips of a long line.
constexpr milliseconds kOneTry{3000};

}  // namespace

milliseconds leftUntil(Clock::time_point deadline) {
  return std::max(milliseconds(1), std::chrono::duration_cast<milliseconds>(deadline - Clock::now()));
}

void ChangeAttempt::check() const {
  const char* const how = ended_;
  TORCH_CHECK_WITH(DistBackendError, how == nullptr, "bagua:reconfigure: the group ", how,
                   " while it waited for other members");
}

ChangeStore::ChangeStore(const std::string& name, const c10::intrusive_ptr<c10d::Store>& store,
                         std::shared_ptr<const ChangeAttempt> attempt)
    : PrefixStore(name, sealedStore(store)), attempt_(std::move(attempt)) {}

void ChangeStore::wait(const std::vector<std::string>& keys, const milliseconds& timeout) {
  const auto deadline = Clock::now() + timeout;
  for (milliseconds pause = kShortestPause; !check(keys); pause = std::min(2 * pause, kLongestPause)) {
    attempt_->check();
    // Throws torch's own error.
    if (Clock::now() >= deadline) return PrefixStore::wait(keys, kShortestPause);
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

}  // namespace bagua
