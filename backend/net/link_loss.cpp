// SPDX-License-Identifier: Apache-2.0
// How a link finds that connections have ended, and goes on without them: see Hello.
#include <c10/util/Logging.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "backend/net/greeting.h"
#include "backend/net/link.h"

namespace bagua::net {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// What has come is told after this time, where nothing else goes back that tells it.
constexpr milliseconds kTellAfter{100};
// The side that has not opened a broken connection leaves the other this time to open one.
constexpr milliseconds kTurn{100};
constexpr milliseconds kFirstPause{50};
constexpr milliseconds kLongestPause{1000};
// A link waits so long for a peer on this host that is refused, and for kLeastRefusals.
constexpr milliseconds kRefusedHere{1500};
// Whoever has never been spoken to and ends every connection has, most likely, another secret, or none.
constexpr milliseconds kRefusedUnknown{5000};
// A link is given up after so many refusals in a row at least: one, or a process that was stopped, is not to end it.
constexpr int kLeastRefusals = 5;
// A firewall that is loaded anew refuses once; where a process has ended everything is refused.
constexpr milliseconds kSecondLook{250};
// A first small message after a pause is unanswered for a round trip, whatever its connection has been silent for.
constexpr int kSilentLooks = 2;
constexpr std::chrono::minutes kLogInterval{1};
// A link remembers the numbers of so many connections that never come.
constexpr size_t kMostNeverComing = 1024;

Frame lastWordOf(uint64_t number, uint64_t frames) {
  return {.kind = Frame::Kind::kEnded, .key = {.stream = number}, .total = frames};
}

}  // namespace

std::atomic<uint64_t>& reconnections() {
  static std::atomic<uint64_t> count = 0;
  return count;
}

// --- Reading ---------------------------------------------------------------------------------------------------------

void Link::onWritable(Connection& connection) {
  Lock lock(mutex_);
  if (connection.isClosed || connection.isBusy) return;
  connection.isBlocked = false;
  loop_->askForWritable(connection.socket().number(), false);
  pump(lock);
}

void Link::onRead(const std::shared_ptr<Connection>& connection, FrameReader::Result result) {
  const auto& reader = connection->reader();
  switch (result) {
    case FrameReader::Result::kMore:
    case FrameReader::Result::kDry: {
      if (!connection->owesWord()) return;
      if (!connection->owesMuch()) return tellLater();
      Lock lock(mutex_);
      connection->isToTell = true;
      return pump(lock);
    }
    case FrameReader::Result::kEnd:
      return lose(connection, 0, reader.isInFrame() ? "it has ended in the middle of a message" : "it has ended");
    case FrameReader::Result::kBroken:
      return lose(connection, reader.errorNumber(), reader.error());
    case FrameReader::Result::kWrong:
      if (isStranger(*connection)) return lose(connection, 0, reader.error());
      return close("Connection closed by peer: " + reader.error());
  }
}

bool Link::isStranger(const Connection& connection) {
  const Lock lock(mutex_);
  return connection.isOwn() && !connection.isWelcome && (!isReachable() || hasWelcome());
}

void Link::tellLater() {
  if (std::exchange(isTellPlanned_, true)) return;
  later(kTellAfter, [](Link& link) {
    link.isTellPlanned_ = false;
    Lock lock(link.mutex_);
    for (const auto& connection : link.connections_) connection->isToTell = connection->owesWord();
    link.pump(lock);
  });
}

// --- Ending ----------------------------------------------------------------------------------------------------------

void Link::end(const std::shared_ptr<Connection>& connection) {
  connection->isClosed = true;
  loop_->remove(connection->socket().number());
  shutdown(connection->socket().number(), SHUT_RDWR);
  std::erase(connections_, connection);
  if (const Frame* const frame = connection->reader().unfinished()) {
    interrupted_.insert({frame->group, frame->key, frame->offset});
  }
  // The peer does not know a connection that was never open, and none carries frames before its handshake is over.
  if (connection->isConnecting) return;
  ended_.push_back(connection);
  lastWords_.push_back(lastWordOf(connection->number(), connection->reader().frames()));
}

void Link::sayLastWords() {
  for (const auto& word : lastWords_) outbox_.addControl(word);
  lastWords_.clear();
}

bool Link::settle(const std::shared_ptr<Connection>& connection) {
  if (!connection->sent().acknowledge(*connection->lastWord)) return false;
  auto frames = connection->sent().takeUnreceived();
  auto unwritten = connection->takeUnwritten();
  if (unwritten && isCounted(unwritten->header)) {
    if (connection->sent().isEmpty()) return false;
    frames.push_back(std::move(*unwritten));
  }
  outbox_.sendAgain(std::move(frames));
  std::erase(ended_, connection);
  if (connection->hasCarried()) noteReconnection();
  return true;
}

void Link::noteReconnection() {
  ++reconnections_;
  ++reconnections();
  const auto now = Clock::now();
  if (logged_ && now - *logged_ < kLogInterval) return;
  logged_ = now;
  LOG(WARNING) << "bagua: connections to " << address_.text() << " have broken (" << lastFailure_
               << "), and others have taken their place, " << reconnections_ << " so far. Nothing is lost";
}

milliseconds Link::pause() const {
  return std::min(kFirstPause * (1 << std::clamp(failures_ - 1, 0, 10)), kLongestPause);
}

void Link::lose(const std::shared_ptr<Connection>& connection, int error, const std::string& text) {
  if (!connection->isWelcome) return onUnopened(connection, error, text);
  Lock lock(mutex_);
  if (!error_.empty() || connection->isClosed) return;
  end(connection);
  lastFailure_ = text;
  // The kernel has waited as long as this link would.
  if (error == ETIMEDOUT) lonelyLooks_ = std::max(lonelyLooks_, kLooks - 2);
  if (!lastError_.empty()) {
    if (connections_.empty()) close(lock, lastError_);
    return;
  }
  const bool isFirst = failures_++ == 0;
  const auto turn = connection->isOwn() ? milliseconds(0) : kTurn;
  dialLater(isFirst ? turn : std::max(turn, pause()));
  const bool isHopeless = address_.size() == 0 || Clock::now() < noMoreBefore_;
  if (isHopeless && hasWelcome()) sayLastWords();
  pump(lock);
}

void Link::onUnopened(const std::shared_ptr<Connection>& connection, int error, const std::string& text) {
  Lock lock(mutex_);
  if (!error_.empty() || (connection && connection->isClosed)) return;
  if (connection) {
    end(connection);
  } else {
    isDialPlanned_ = false;
  }
  // One that was overdue has been replaced, and says nothing new. An additional one has led nowhere.
  const bool isNews = !connection || !connection->isOverdue;
  if (isNews) noteUnopened(error, text, connection && connection->isAnswered);
  if (!lastError_.empty()) {
    if (connections_.empty()) close(lock, lastError_);
  } else if (hasWelcome()) {
    if (isNews || connection->isAdditional) noMoreBefore_ = Clock::now() + kWithoutMore;
    sayLastWords();
    pump(lock);
  } else if (connections_.empty() && !comesByItself() && refusals_ >= kLeastRefusals && Clock::now() >= *givesUpAt_) {
    close(lock, lastFailure_);
  } else {
    dialLater(firstRefusal_ ? kSecondLook : pause());
  }
}

void Link::noteUnopened(int error, const std::string& text, bool isAnswered) {
  ++failures_;
  lastFailure_ = "cannot connect to " + address_.text() + ": " + text;
  if (error == ECONNREFUSED && !isAnswered && isReachable() && !hasWelcome()) {
    if (!firstRefusal_) firstRefusal_ = Clock::now();
  } else {
    firstRefusal_.reset();
  }
  if (firstRefusal_ && Clock::now() - *firstRefusal_ >= kSecondLook) {
    lastError_ = "Connection closed by peer: its process has ended, nobody listens at " + address_.text() + " any more";
    hasPeerDied_ = true;
  }
  // Whoever has never been reached may be behind a firewall that refuses, and come when it has something to say.
  const bool isRefusedHere = error == ECONNREFUSED && isOfThisHost(address_);
  if ((isRefusedHere || isAnswered) && !hasWelcome()) {
    const auto refused = isRefusedHere ? kRefusedHere : std::min(kRefusedUnknown, opening_.patience);
    const auto end = Clock::now() + (isAnswered && peerLink_ ? opening_.patience : refused);
    givesUpAt_ = std::min(givesUpAt_.value_or(end), end);
    ++refusals_;
  } else {
    forgetRefusals();
  }
  if (isAnswered || !hasWelcome()) return;
  // Something lets some connections through and not others; or the peer has ended while the line was away.
  probeLater(beforeProbe());
  if (error == ECONNREFUSED && isReachable()) endSilent();
}

void Link::forgetRefusals() {
  givesUpAt_.reset();
  refusals_ = 0;
}

bool Link::onEnded(const Connection& teller, uint64_t number, uint64_t frames) {
  Lock lock(mutex_);
  if (!error_.empty()) return true;
  const auto isIt = [&](const auto& connection) { return connection->number() == number; };
  if (number == teller.number()) return false;
  if (const auto open = std::ranges::find_if(connections_, isIt); open != connections_.end()) {
    end(std::shared_ptr(*open));
  }
  const auto found = std::ranges::find_if(ended_, isIt);
  if (found == ended_.end()) {
    const bool isOfPeer = number % 2 == parityOf(process_, self_);
    if (!isOfPeer || frames > 0) return false;
    if (!neverComing_.insert(number).second) return false;
    // The peer opens another where one is refused without need.
    if (neverComing_.size() > kMostNeverComing) noneBelow_ = neverComing_.extract(neverComing_.begin()).value() + 1;
    outbox_.addControl(lastWordOf(number, 0));
    pump(lock);
    return true;
  }
  const auto connection = *found;
  if (std::exchange(connection->lastWord, frames)) return false;
  // The peer is alive: all that is to be said can be.
  sayLastWords();
  if (!connection->isBusy && !settle(connection)) return false;
  pump(lock);
  return true;
}

void Link::beginWith(Connection& connection) {
  lonelyLooks_ = 0;
  forgetRefusals();
  spares_ = 0;
  lastError_.clear();
  hasPeerDied_ = false;
  firstRefusal_.reset();
  sayLastWords();
  connection.silentLooks = 0;
  endSilent();
}

// The kernel would find out that the line is back after as long as it was away.
void Link::endSilent() {
  for (const auto& connection : connections_) {
    const bool isSilent =
        connection->silentLooks >= kSilentLooks && unansweredFor(connection->socket()) >= lookInterval();
    if (isSilent) shutdown(connection->socket().number(), SHUT_RDWR);
  }
}

// --- Silence ---------------------------------------------------------------------------------------------------------

void Link::watch() {
  if (!std::exchange(isWatched_, true)) lookLater();
}

// A stopped process still has a kernel that acknowledges; a host without power, or behind a cut line, has not. The
// kernel's own limits do not tell these apart: TCP_USER_TIMEOUT also ends a connection whose receiver has no room.
// Keepalives (see configure) find the same where nothing is under way.
void Link::lookForSilence() {
  const auto seconds = std::to_string(std::chrono::ceil<std::chrono::seconds>(opening_.patience).count()) + " s";
  Lock lock(mutex_);
  if (!error_.empty()) return;
  std::string over;
  bool isTouched = false;
  int heard = 0;
  bool isAnySilent = false;
  for (const auto& connection : connections_) {
    if (!connection->isAnswered) continue;
    const bool isSilent = unansweredFor(connection->socket()) >= lookInterval();
    connection->silentLooks = isSilent ? connection->silentLooks + 1 : 0;
    if (connection->silentLooks >= kSilentLooks) {
      // Nobody misses one beside those that work.
      isAnySilent = isAnySilent || connection->isWelcome || !hasWelcome();
      if (!connection->isWelcome) noteOverdue(*connection);
    }
    // A proxy on the way may take connections that lead nowhere.
    if (!connection->isWelcome && !hasTakenBytes(connection->socket())) continue;
    isTouched = true;
    if (connection->silentLooks < kLooks) ++heard;
  }
  lonelyLooks_ = isTouched ? 0 : lonelyLooks_ + 1;
  if (isTouched && heard == 0) {
    over = "Connection closed by peer: its host has acknowledged nothing for " + seconds;
  } else if (lonelyLooks_ >= kLooks && isReachable()) {
    over = "Connection closed by peer: its host has not been reached for " + seconds + " (" + lastFailure_ + ")";
  } else if (lonelyLooks_ >= kLooks) {
    over = lastFailure_ +
           ". Nor has it come to this process. One of the two has to be reachable for the other: its "
           "firewall, or the translator of addresses before it, has to let connections in. Or its process has ended";
  }
  for (const auto& connection : connections_) {
    const bool isReplaced = connection->isOverdue && hasWelcome();
    if (isReplaced || connection->silentLooks >= kLooks) shutdown(connection->socket().number(), SHUT_RDWR);
  }
  if (isAnySilent) dial();
  if (over.empty()) return lookLater();
  close(lock, over);
}

}  // namespace bagua::net
