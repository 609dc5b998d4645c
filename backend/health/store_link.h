// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "backend/health/failure_board.h"
#include "backend/operation/operation.h"

namespace bagua {

// A group's connection to its store, which may be gone, or not answer. A store that throws is tried again, over a new
// connection, at growing intervals, until its owner's patience is over; then the group goes on without it.
//
// One thread uses the link; what others may ask is at the end.
class StoreLink {
 public:
  enum class State { kConnected, kWaiting, kUnanswered };

  // `store` is null where the ranks have none in common.
  StoreLink(const GroupIdentity& group, c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds patience);

  // Connects if need be. A store that is gone can take its whole timeout, minutes, to say so: another thread asks it.
  State connect();
  // Null while there is no connection.
  [[nodiscard]] FailureBoard* board() const { return board_.get(); }
  void disconnect() { board_.reset(); }

  // Drops the connection, in which an answer may be left over, and says when to try again: later, where an attempt
  // is over. Whether patience is over too. `isInUse`: somebody waits for the group, and is to be warned.
  bool noteTrouble(const std::string& text, bool isOver, bool isInUse);
  void noteRecovery();
  // From now on this rank does without the store.
  void giveUp(const std::string& why);

  // Held while the thread talks to the store.
  class Call {
   public:
    explicit Call(StoreLink& link) : link_(link) { link_.setInCall(true); }
    ~Call() { link_.setInCall(false); }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    StoreLink& link_;
  };

  // From any thread.
  [[nodiscard]] bool exists() const { return store_ != nullptr; }
  // The ranks will never again agree on anything.
  [[nodiscard]] bool isGivenUp() const;
  [[nodiscard]] bool isInTrouble() const;
  // Nobody should wait for it: it has not answered, or has been in trouble, for some time already.
  [[nodiscard]] bool isStuck() const;
  // Why there is no connection, in words.
  [[nodiscard]] std::string whyCutOff() const;

 private:
  // The store has thrown, or does not let anybody connect.
  struct Trouble {
    std::chrono::steady_clock::time_point since;
    std::chrono::milliseconds pause{0};
    std::chrono::steady_clock::time_point nextTry;
    std::string text;
  };
  // `error` where there is no board: a text, for an exception would live on two threads.
  struct Connection {
    std::unique_ptr<FailureBoard> board;
    std::string error;
  };

  void setInCall(bool isInCall);

  const GroupIdentity group_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const std::chrono::milliseconds patience_;

  // Of the one thread.
  std::unique_ptr<FailureBoard> board_;
  std::future<Connection> connecting_;
  std::chrono::steady_clock::time_point connectingSince_;
  bool hasWarned_ = false;

  mutable std::mutex mutex_;
  std::optional<Trouble> trouble_;
  // Empty while the ranks may agree.
  std::string whyGivenUp_;
  std::optional<std::chrono::steady_clock::time_point> inCallSince_;
};

}  // namespace bagua
