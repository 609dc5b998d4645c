// SPDX-License-Identifier: Apache-2.0
#include "backend/health/store_pulse.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "backend/os/fork_held_mutex.h"
#include "backend/os/process_mark.h"
#include "backend/security/sealed_store.h"

namespace bagua {
namespace {

using Clock = std::chrono::steady_clock;

// So many beats may be missing, or come between two looks; what anybody may have made of the counter costs no more.
constexpr int kMostAtOnce = 64;
constexpr const char* kBeats = "bagua/health/beats";
std::string keyOf(int64_t beat) { return "bagua/health/beat/" + std::to_string(beat); }

// Without the prefixes of groups, and without their seal: beats tell nothing. Owned by the outer ones.
c10d::Store& rootOf(c10d::Store& store) {
  if (auto* const prefixed = dynamic_cast<c10d::PrefixStore*>(&store)) return rootOf(*prefixed->getUnderlyingStore());
  if (auto* const sealed = dynamic_cast<SealedStore*>(&store)) return rootOf(sealed->underlying());
  return store;
}

std::string nameOf(c10d::Store& root) {
  if (const auto* const tcp = dynamic_cast<const c10d::TCPStore*>(&root)) {
    return tcp->getHost() + " " + std::to_string(tcp->getPort());
  }
  return std::to_string(reinterpret_cast<uintptr_t>(&root));
}

struct Pulses {
  ForkHeldMutex mutex;
  std::optional<ProcessMark> mark{std::in_place};
  std::map<std::string, std::weak_ptr<StorePulse>> byStore;

  static Pulses& ofProcess() {
    // Never destroyed: a thread that is stuck in a store may outlive everything else.
    static auto* const pulses = new Pulses;
    return *pulses;
  }
};
// Made when the library is loaded: a fork while another thread makes them would leave them unmade in the child.
[[maybe_unused]] const Pulses& pulsesMadeEarly = Pulses::ofProcess();

}  // namespace

std::shared_ptr<StorePulse> StorePulse::of(c10d::Store& store) {
  auto& pulses = Pulses::ofProcess();
  const std::lock_guard lock(pulses.mutex);
  // The parent's may be in a call, which no thread of this process ends.
  if (pulses.mark->isFromParent()) {
    neverDestroy(std::exchange(pulses.byStore, {}));
    pulses.mark.emplace();
  }
  std::erase_if(pulses.byStore, [](const auto& entry) { return entry.second.expired(); });
  auto& known = pulses.byStore[nameOf(rootOf(store))];
  auto pulse = known.lock();
  if (!pulse) {
    pulse = std::make_shared<StorePulse>();
    known = pulse;
  }
  return pulse;
}

void StorePulse::beat(c10d::Store& store) {
  auto& root = rootOf(store);
  const int64_t number = root.add(kBeats, 1);
  // Earlier ones, whose ranks have ended before they could set theirs, would hide this one.
  int64_t first = number;
  while (first > 1 && number - first < kMostAtOnce && !root.check({keyOf(first - 1)})) --first;
  for (int64_t missing = first; missing <= number; ++missing) root.set(keyOf(missing), std::vector<uint8_t>());
}

// One request, and one more for every beat since the last time. A check changes nothing in the store, of whatever kind.
uint64_t StorePulse::beats(c10d::Store& store, std::chrono::milliseconds interval) {
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (lock && (beats_ < 0 || Clock::now() - asked_ >= interval)) {
    auto& root = rootOf(store);
    if (beats_ < 0) beats_ = root.add(kBeats, 0);
    for (int found = 0; found < kMostAtOnce && root.check({keyOf(beats_ + 1)}); ++found) ++beats_;
    asked_ = Clock::now();
  }
  return static_cast<uint64_t>(std::max<int64_t>(beats_, 0));
}

}  // namespace bagua
