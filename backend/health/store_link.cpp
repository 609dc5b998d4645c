// SPDX-License-Identifier: Apache-2.0
#include "backend/health/store_link.h"

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <c10/util/thread_name.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "backend/health/health_times.h"

namespace bagua {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

StoreLink::StoreLink(const GroupIdentity& group, c10::intrusive_ptr<c10d::Store> store, milliseconds patience)
    : group_(group), store_(std::move(store)), patience_(patience) {
  if (!store_) whyGivenUp_ = "the ranks have no store in common";
}

StoreLink::State StoreLink::connect() {
  if (board_) return State::kConnected;
  if (!connecting_.valid()) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (trouble_ && Clock::now() < trouble_->nextTry) return State::kWaiting;
    }
    std::promise<Connection> connected;
    connecting_ = connected.get_future();
    connectingSince_ = Clock::now();
    std::thread([shared = store_, rank = group_.rank, connected = std::move(connected)]() mutable {
      c10::setThreadName("bagua_connect");
      Connection connection;
      try {
        connection.board = std::make_unique<FailureBoard>(*shared, rank);
      } catch (...) {
        connection.error = messageOf(std::current_exception());
      }
      connected.set_value(std::move(connection));
    }).detach();
  }
  if (connecting_.wait_for(kTick) == std::future_status::ready) {
    auto connection = connecting_.get();
    TORCH_CHECK_WITH(DistStoreError, connection.board != nullptr, connection.error);
    board_ = std::move(connection.board);
    return State::kConnected;
  }
  return Clock::now() - connectingSince_ >= kStoreTime ? State::kUnanswered : State::kWaiting;
}

bool StoreLink::noteTrouble(const std::string& text, bool isOver, bool isInUse) {
  board_.reset();
  const auto now = Clock::now();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!trouble_) trouble_.emplace(Trouble{.since = now, .pause = {}, .nextTry = {}, .text = {}});
    if (isOver) trouble_->pause = std::clamp(trouble_->pause * 2, kShortestPause, kLongestPause);
    trouble_->nextTry = now + trouble_->pause;
    trouble_->text = text;
    if (now - trouble_->since >= patience_) return true;
  }
  // Not to an idle rank: the process that holds the store may have come to its end before this one.
  if (isInUse && !std::exchange(hasWarned_, true)) {
    LOG(WARNING) << "bagua: rank " << group_.rank << " of " << group_.size << ", group '" << group_.name
                 << "': " << text << ". It is tried again for " << patience_.count() << " ms";
  }
  return false;
}

void StoreLink::noteRecovery() {
  const std::lock_guard<std::mutex> lock(mutex_);
  trouble_.reset();
}

void StoreLink::giveUp(const std::string& why) {
  board_.reset();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    whyGivenUp_ = why;
  }
  LOG(WARNING) << "bagua: rank " << group_.rank << " of " << group_.size << ", group '" << group_.name
               << "', goes on without the store of the group: " << why
               << ". It no longer hears of failures on other ranks, nor they of its own, and a timeout does not name "
               << "the ranks that are missing";
}

bool StoreLink::isGivenUp() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return !whyGivenUp_.empty();
}

bool StoreLink::isInTrouble() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return trouble_.has_value();
}

bool StoreLink::isStuck() const {
  const auto now = Clock::now();
  const std::lock_guard<std::mutex> lock(mutex_);
  return (inCallSince_ && now - *inCallSince_ >= kStoreTime) || (trouble_ && now - trouble_->since >= kTroubleTime);
}

std::string StoreLink::whyCutOff() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!whyGivenUp_.empty()) return whyGivenUp_;
  return trouble_ ? trouble_->text : "the store has not answered";
}

void StoreLink::setInCall(bool isInCall) {
  const std::lock_guard<std::mutex> lock(mutex_);
  inCallSince_ = isInCall ? std::optional(Clock::now()) : std::nullopt;
}

}  // namespace bagua
