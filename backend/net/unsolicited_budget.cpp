// SPDX-License-Identifier: Apache-2.0
#include "backend/net/unsolicited_budget.h"

#include <utility>

namespace bagua::net {

bool UnsolicitedBudget::charge(uint64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  charged_ += bytes;
  return charged_ <= kUnsolicitedBytes;
}

void UnsolicitedBudget::release(uint64_t bytes) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    released_ += bytes;
  }
  grantCredit(kCreditBytes);
}

void UnsolicitedBudget::grantCredit(uint64_t minimum) {
  uint64_t released = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (released_ < minimum) return;
    released = std::exchange(released_, 0);
    charged_ -= released;
  }
  if (const auto sender = sender_.lock()) sender->grantCredit(group_, released);
}

void UnsolicitedBudget::grantPlace(const MessageKey& key) {
  if (const auto sender = sender_.lock()) sender->grantPlace(group_, key, kEagerBytes);
}

}  // namespace bagua::net
