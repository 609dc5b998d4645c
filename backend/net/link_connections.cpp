// SPDX-License-Identifier: Apache-2.0
// How a link opens connections, and takes those that the peer opens.
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "backend/net/greeting.h"
#include "backend/net/link.h"

namespace bagua::net {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Below this round trip two connections keep a fast line busy.
constexpr std::chrono::microseconds kDistant{2000};
constexpr int kNearConnections = 2;
// Over a distance, the kernel's buffers let one connection have this much under way, by default. More connections than
// the line needs overflow the queue before it, and each loss waits for all that is in that queue: with 1, 2, 3, 4, 8
// and 16 of them opened by each side an allreduce of 64 MiB at 1 Gbit/s took 592, 578, 601, 587, 796 and 1579 ms with a
// round trip of 10 ms, and 814, 811, 592, 590, 877 and 2211 with 50 ms; a step of 8.4 MB at 100 Mbit/s and 10 ms took
// 733, 761 and 880 ms with 1, 2 and 4.
constexpr double kBytesOfConnection = 2e6;
constexpr int kMostToHold = 8;
// Where one connection has half of that under way over a long way, so many begin together: one that begins once the
// line is full leaves the kernel's slow start at the first queue, and stays slow for seconds.
constexpr std::chrono::microseconds kFar{20000};
constexpr int kFarConnections = 4;
// Of several connections over a distance, one that is new or has just lost packets is much slower than the others. It
// takes no more than it sends in a quarter of a round trip, as a message waits for all that has been taken; but at
// least this, which is worth a header and a call of the kernel.
constexpr int64_t kShareOfWindow = 4;
constexpr uint32_t kLeastPayload = 32U << 10U;
constexpr int64_t kLeastUnsent = 16 << 10;
// Less backlog is not worth the opening of another connection.
constexpr uint64_t kBacklogBytes = 512U << 10U;
// The kernel asks a host again after 1, 2, 4 and more seconds. Where a line was cut for a while, another try is faster.
constexpr milliseconds kDialTime{3000};
constexpr milliseconds kUntilEndsAreRead{100};
// The wait for a Hello's answer doubles so many times.
constexpr int kMostDoublings = 12;

// Returns whether few files are left for what a process cannot do without: other connections, pipes, checkpoints.
bool areFilesShort() {
  rlimit files{};
  // It has the lowest number that is free.
  const UnsharedFile file(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (getrlimit(RLIMIT_NOFILE, &files) != 0 || !file.isOpen()) return true;
  return static_cast<rlim_t>(file.number()) > files.rlim_cur / 4 * 3;
}

}  // namespace

void Link::later(milliseconds delay, std::function<void(Link&)> call) {
  loop_->callLater(delay, [weak = weak_from_this(), call = std::move(call)] {
    if (const auto link = weak.lock()) call(*link);
  });
}

void Link::connect() {
  const Lock lock(mutex_);
  if (error_.empty() && connections_.empty()) dial();
}

Line Link::line() {
  const Lock lock(mutex_);
  return lineOfAll();
}

Line Link::lineOfAll() const {
  Line all;
  for (const auto& connection : connections_) {
    if (connection->isConnecting) continue;
    const Line line = lineOf(connection->socket());
    all.roundTrip = all.roundTrip.count() == 0 ? line.roundTrip : std::min(all.roundTrip, line.roundTrip);
    // The one that has most under way sees the queue of now best.
    if (line.roundTripNow.count() > 0 && line.window > all.window) {
      all.roundTripNow = line.roundTripNow;
      all.window = line.window;
    }
    all.bytesPerSecond += line.bytesPerSecond;
    all.sent += line.sent;
    all.lost += line.lost;
  }
  return all;
}

// Returns as many as hold what is on its way when the line is full, or as overcome its losses. Fewer of them show a
// rate that asks for more.
int Link::neededConnections() {
  const Line line = lineOfAll();
  if (line.roundTrip < kDistant) return kNearConnections;
  if (!usesBbr_) lossWatch_.look(line, static_cast<int>(connections_.size()), Clock::now());
  if (lossWatch_.hasLoss() && !std::exchange(hasAskedForBbr_, true)) {
    usesBbr_ = std::ranges::all_of(connections_, [](const auto& connection) { return useBbr(connection->socket()); });
  }
  const double underWay =
      static_cast<double>(line.bytesPerSecond) * std::chrono::duration<double>(line.roundTrip).count();
  const int least = line.roundTrip < kFar || underWay < kBytesOfConnection / 2 ? 1 : kFarConnections;
  const int toHold = std::clamp(1 + static_cast<int>(std::min(underWay / kBytesOfConnection, 1e6)), least, kMostToHold);
  return usesBbr_ ? toHold : std::max(toHold, lossWatch_.worth());
}

uint32_t Link::payloadFor(Connection& connection) const {
  // Nothing less is worth a question to the kernel.
  if (outbox_.backlog() <= kLeastPayload) return kMostPayload;
  int64_t share = kMostPayload;
  if (connections_.size() > 1) {
    const Line line = lineOf(connection.socket());
    if (line.roundTrip >= kDistant) share = line.window / kShareOfWindow;
  }
  const auto unsent = static_cast<int>(std::clamp<int64_t>(share, kLeastUnsent, kMostUnsent));
  if (std::exchange(connection.mostUnsent, unsent) != unsent) limitUnsent(connection.socket(), unsent);
  return static_cast<uint32_t>(std::clamp<int64_t>(share, kLeastPayload, kMostPayload));
}

void Link::openWhereNeeded() {
  const auto count = static_cast<int>(connections_.size());
  if (count == 0) return dial();
  if (!lastError_.empty() || outbox_.backlog() < kBacklogBytes) return;
  const auto isConnecting = [](const auto& connection) { return connection->isConnecting; };
  if (std::ranges::any_of(connections_, isConnecting)) return;
  // Losses are looked for, and BBR asked for, where no more connections may be opened, too.
  const bool hasAll = count >= opening_.mostConnections;
  if (hasAll && hasAskedForBbr_) return;
  const int wanted = std::min(neededConnections(), opening_.mostConnections);
  // No group has told us yet where the peer listens if there is no address: its connections have to do.
  if (hasAll || address_.size() == 0 || isDialPlanned_ || Clock::now() < noMoreBefore_) return;
  if (wanted > count && areFilesShort()) {
    noMoreBefore_ = Clock::now() + kWithoutMore;
    return;
  }
  // All at once: one after another would take a round trip each.
  for (int i = count; i < wanted && !isDialPlanned_; ++i) open();
}

bool Link::isDialing() const {
  return std::ranges::any_of(connections_, [](const auto& one) { return !one->isWelcome && !one->isOverdue; });
}

bool Link::hasWelcome() const {
  return std::ranges::any_of(connections_, [](const auto& one) { return one->isWelcome; });
}

// Where nothing translates addresses, it is likely that nothing filters connections either: that is taken for granted
// until there has been time for a probe, so that a death is noticed soon.
bool Link::isReachable() const {
  if (reach_ != Reach::kUntried) return reach_ == Reach::kAnswers;
  return address_.size() > 0 && peersSource_ == address_.address();
}

void Link::probeLater(milliseconds least) {
  if (std::exchange(isProbePlanned_, true)) return;
  // Hundreds of links that were made together do not do it together.
  const auto part = static_cast<int>(id_ / 2 % 1024U);
  later(least + least * part / 1024, [](Link& link) { link.probe(); });
}

void Link::probe() {
  std::shared_ptr<Probe> probe;
  SocketAddress to;
  {
    const Lock lock(mutex_);
    isProbePlanned_ = false;
    if (!error_.empty() || probe_ || !hasWelcome() || address_.size() == 0) return;
    const Hello hello{.from = self_, .to = process_, .link = id_, .peerLink = Hello::kNoLink};
    to = address_;
    probe = probe_ = std::make_shared<Probe>(loop_, hello, [weak = weak_from_this()](Probe::Result result) {
      if (const auto link = weak.lock()) link->onProbed(result);
    });
  }
  probe->start(to, opening_.encryption.get(), lookInterval());
}

void Link::onProbed(Probe::Result result) {
  const Lock lock(mutex_);
  probe_.reset();
  if (result == Probe::Result::kAnswered) reach_ = Reach::kAnswers;
  if (result != Probe::Result::kFiltered) return;
  // A line that is away says nothing of firewalls.
  const auto isSilent = [](const auto& connection) { return connection->silentLooks > 0; };
  if (std::ranges::any_of(connections_, isSilent)) return probeLater(opening_.patience);
  // A process that has ended refuses, too, and the ends of its connections may not have been read yet. They have been
  // after this time.
  later(kUntilEndsAreRead, [](Link& link) {
    const Lock again(link.mutex_);
    if (link.hasWelcome()) link.reach_ = Reach::kFiltered;
  });
  probeLater(opening_.patience);
}

void Link::dial() {
  if (address_.size() > 0 && lastError_.empty() && !isDialPlanned_ && !isDialing()) open();
}

void Link::dialLater(milliseconds delay) {
  if (address_.size() == 0 || !lastError_.empty() || std::exchange(isDialPlanned_, true)) return;
  later(delay, [](Link& link) {
    const Lock lock(link.mutex_);
    link.isDialPlanned_ = false;
    // The peer may have opened one meanwhile.
    const bool isNeeded = !link.hasWelcome() || !link.lastWords_.empty();
    if (link.error_.empty() && isNeeded) link.dial();
  });
}

void Link::open() {
  watch();
  int error = 0;
  std::string text;
  try {
    UnsharedFile socket = startConnecting(address_, error);
    if (error == 0) {
      auto encrypted = opening_.encryption ? opening_.encryption->connect(socket.number()) : nullptr;
      const uint64_t number = 2 * ++opened_ + parityOf(self_, process_);
      const Hello hello{
          .from = self_, .to = process_, .link = id_, .peerLink = peerLink_.value_or(0), .connection = number};
      const auto connection = std::make_shared<Connection>(
          weak_from_this(), Stream(std::move(socket), std::move(encrypted)), number, /*isOwn=*/true, bytesOf(hello));
      connection->isSpare =
          !hasWelcome() && std::ranges::any_of(connections_, [](const auto& one) { return one->isOverdue; });
      if (connection->isSpare) ++spares_;
      connection->isAdditional = hasWelcome();
      add(connection, true);
      limitWait(connection);
      return;
    }
    text = std::generic_category().message(error);
  } catch (const c10::Error& failure) {
    error = EMFILE;
    text = failure.what_without_backtrace();
  }
  // The link may be over with that, which is told without the mutex.
  isDialPlanned_ = true;
  later(milliseconds(0), [error, text](Link& link) { link.onUnopened(nullptr, error, text); });
}

void Link::limitWait(const std::shared_ptr<Connection>& connection) {
  later(kDialTime, [tried = std::weak_ptr(connection)](Link& link) {
    const auto unanswered = tried.lock();
    if (unanswered && !unanswered->isAnswered) link.lose(unanswered, ETIMEDOUT, "its host does not answer");
  });
  const auto welcomeTime = opening_.patience / 2 * (1 << std::min(spares_, kMostDoublings));
  later(welcomeTime, [tried = std::weak_ptr(connection)](Link& link) {
    const auto unwelcome = tried.lock();
    if (!unwelcome || unwelcome->isWelcome || !unwelcome->isAnswered) return;
    const Lock lock(link.mutex_);
    if (!link.error_.empty() || unwelcome->isClosed) return;
    link.noteOverdue(*unwelcome);
    if (!link.hasWelcome()) link.dial();
  });
}

void Link::noteOverdue(Connection& connection) {
  if (std::exchange(connection.isOverdue, true)) return;
  lastFailure_ = "cannot connect to " + address_.text() + ": its process does not answer";
}

void Link::add(const std::shared_ptr<Connection>& connection, bool wantsWritable) {
  if (usesBbr_) useBbr(connection->socket());
  loop_->add(connection->socket().number(), connection, wantsWritable);
  connections_.push_back(connection);
  watch();
}

void Link::learnAddress(const SocketAddress& address) {
  const Lock lock(mutex_);
  const bool isNew = address_.size() == 0;
  address_ = address;
  if (isNew && reach_ == Reach::kUntried && hasWelcome()) probeLater(beforeProbe());
  if (isNew && error_.empty() && isWatched_ && !hasWelcome()) dialLater(milliseconds(0));
}

void Link::onConnecting(const std::shared_ptr<Connection>& connection) {
  using Handshake = EncryptedStream::Handshake;
  // No other thread writes to the connection before it is one.
  Stream& stream = connection->stream();
  const int error = connection->isAnswered ? 0 : errorOf(connection->socket());
  if (error != 0) return lose(connection, error, std::generic_category().message(error));
  connection->isAnswered = true;
  const auto state = stream.handshake();
  if (state == Handshake::kUnderWay) {
    return loop_->askForWritable(connection->socket().number(), stream.hasUnsent());
  }
  if (state == Handshake::kLost) return lose(connection, ECONNRESET, stream.error());
  Lock lock(mutex_);
  connection->isConnecting = state != Handshake::kDone;
  const SocketAddress to = address_;
  lock.unlock();
  if (state == Handshake::kDone) return connection->onWritable();
  if (isStranger(*connection)) return lose(connection, 0, stream.error());
  close("cannot connect to " + to.text() + ": " + stream.error());
}

bool Link::adopt(Stream& stream, const Hello& hello) {
  Lock lock(mutex_);
  if (!error_.empty() || peerLink_.value_or(hello.link) != hello.link) return false;
  const auto isIt = [&](const auto& connection) { return connection->number() == hello.connection; };
  const bool isKnown = std::ranges::any_of(connections_, isIt) || std::ranges::any_of(ended_, isIt) ||
                       hello.connection < noneBelow_ || neverComing_.contains(hello.connection);
  // The peer has given it up, or is none.
  if (isKnown || hello.connection % 2 != parityOf(process_, self_)) return true;
  peerLink_ = hello.link;
  peersSource_ = peerOf(stream.socket());
  if (reach_ != Reach::kAnswers) probeLater(beforeProbe());
  const bool hasBuffered = stream.hasBuffered();
  const Hello answer{
      .from = self_, .to = process_, .link = id_, .peerLink = hello.link, .connection = hello.connection};
  const auto connection = std::make_shared<Connection>(weak_from_this(), std::move(stream), hello.connection,
                                                       /*isOwn=*/false, answerOf(answer));
  add(connection, hasBuffered);
  beginWith(*connection);
  pump(lock);
  return true;
}

bool Link::onWelcome(Connection& connection, const Hello& hello) {
  if (!connection.isOwn() || connection.isWelcome) return false;
  Lock lock(mutex_);
  if (!error_.empty()) return true;
  if (hello.magic != Hello::kMagic || hello.from != process_) {
    if (!isReachable()) {
      // The address may mean another host here than where the peer is, which can still come by itself.
      shutdown(connection.socket().number(), SHUT_RDWR);
      return true;
    }
    hasPeerDied_ = true;
    close(lock, "Connection closed by peer: its process has ended, another one answers at " + address_.text());
  } else if (hello.link == 0 || peerLink_.value_or(hello.link) != hello.link) {
    close(lock, "Connection closed by peer: it has given up what it had with this process");
  } else if (connection.isSpare && hasWelcome()) {
    // The one beside which it was opened was only late.
    connection.isOverdue = true;
    shutdown(connection.socket().number(), SHUT_RDWR);
  } else {
    connection.isWelcome = true;
    connection.isOverdue = false;
    connection.isSpare = false;
    peerLink_ = hello.link;
    reach_ = Reach::kAnswers;
    beginWith(connection);
    pump(lock);
  }
  return true;
}

}  // namespace bagua::net
