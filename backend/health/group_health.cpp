// SPDX-License-Identifier: Apache-2.0
#include "backend/health/group_health.h"

#include <numeric>
#include <utility>

#include "backend/health/health_thread.h"

namespace bagua {
namespace {

std::vector<uint64_t> orAll(std::vector<uint64_t> ranks, int size) {
  if (!ranks.empty()) return ranks;
  ranks.resize(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

GroupHealth::GroupHealth(const GroupIdentity& group, c10::intrusive_ptr<c10d::Store> store,
                         std::vector<uint64_t> globalRanks, std::chrono::milliseconds storePatience,
                         bool survivesDeaths)
    : thread_(std::make_shared<HealthThread>(group, std::move(store), orAll(std::move(globalRanks), group.size),
                                             storePatience, survivesDeaths)) {}

GroupHealth::~GroupHealth() {
  // In a forked child there is no thread.
  if (mark_.isFromParent()) {
    neverDestroy(std::shared_ptr<HealthThread>(thread_));
    return;
  }
  stop();
}

std::shared_ptr<OperationLog> GroupHealth::addLog(const std::string& name, OperationLog::FindLost findLost) {
  return std::make_shared<OperationLog>(thread_, thread_->addLog(name, std::move(findLost)));
}

void GroupHealth::stop() { thread_->stop(); }

}  // namespace bagua
