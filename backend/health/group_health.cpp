// SPDX-License-Identifier: Apache-2.0
#include "backend/health/group_health.h"

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <c10/util/thread_name.h>

#include <algorithm>
#include <condition_variable>
#include <future>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <thread>

#include "backend/config.h"
#include "backend/health/attendance.h"
#include "backend/health/failure_board.h"
#include "backend/health/flight_recorder.h"
#include "backend/peer_errors.h"

namespace bagua {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// How often the thread looks at this rank's operations, and at the store while one of them takes its time or ranks are
// being asked. In a large group the looks at the store are rarer: it serves all ranks.
constexpr milliseconds kTick{100};
constexpr milliseconds kReportTick{20};
constexpr milliseconds kBusyLook{200};
constexpr milliseconds kIdleLook{500};
constexpr milliseconds kLookPerRank{1};
// How long ranks may take to answer a roll call. An idle one looks every kIdleLook.
constexpr milliseconds kAnswerTime{1000};
// How long before a timeout the roll is called, so that the error knows the answers.
constexpr milliseconds kRollCallLead{2000};
// How long a symptom waits for the rank that knows the cause, and for all to answer.
constexpr milliseconds kCauseTime{1000};
// How long a rank that has called the roll may be behind with what it was to report, before another takes its place.
constexpr milliseconds kTurnTime{500};
// How long a rank that reports for all waits before its own callers learn of it: the others look within this time, and
// a process that ends at once may take the store with it.
constexpr milliseconds kReadingTime{500};
// How long the caller of an operation waits until the ranks have agreed on a cause.
constexpr milliseconds kAgreementTime{3000};
// How long a store that works may take to answer.
constexpr milliseconds kStoreTime{2000};
// A store that throws is tried again after the first of these, then after twice that time, and so on up to the second.
constexpr milliseconds kShortestPause{100};
constexpr milliseconds kLongestPause{5000};
// How long the caller of an operation waits for a store that is in trouble: it may be over in a moment.
constexpr milliseconds kTroubleTime{1000};
// How long a transport goes on beyond the timeout of an operation.
constexpr milliseconds kPatience{3000};
// How long stop() waits for the thread. Whoever calls may hold the GIL, which the thread can need to drop a tensor.
constexpr milliseconds kStopTime{300};
constexpr int kWarningInterval = 2;  // the next warning comes after this many times as long

std::exception_ptr makeError(const std::string& message) {
  return std::make_exception_ptr(C10_BUILD_ERROR(DistBackendError, message));
}

std::vector<uint64_t> orAll(std::vector<uint64_t> ranks, int size) {
  if (!ranks.empty()) return ranks;
  ranks.resize(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

struct GroupHealth::Core : std::enable_shared_from_this<GroupHealth::Core> {
  using Token = Track::Token;

  struct Running {
    Token token = 0;
    ProgramFingerprint program;
    Track::Kind kind = Track::Kind::kProgram;
    Clock::time_point begun;
    milliseconds timeout{0};
    Clock::time_point nextWarning;
    uint64_t recorded = 0;

    [[nodiscard]] bool isOverdue() const { return Clock::now() >= begun + timeout; }
  };
  struct TrackState {
    std::string name;
    // In the order of their beginnings.
    std::vector<Running> running;
    std::optional<ProgramFingerprint> completed;
    Clock::time_point completedAt;
    Track::Abort abort;
  };
  // What this rank has to say to the others.
  struct Report {
    std::string message;
    bool isSymptom = false;
    // Given up by whoever called abort(), who is not to wait.
    bool isAbort = false;
    Clock::time_point since;
  };
  // Only the thread touches it.
  struct RollCall {
    int64_t number = 0;
    Clock::time_point asked;
    std::map<int, std::vector<Activity>> answers;
    std::vector<int> silent;

    [[nodiscard]] bool isOver() const { return silent.empty() || Clock::now() - asked >= kAnswerTime; }
  };

  // The store has thrown, or does not let anybody connect.
  struct Trouble {
    Clock::time_point since;
    milliseconds pause{0};
    Clock::time_point nextTry;
    std::string text;
  };

  // One rank calls the roll for all that want to know, and tells them by what it reports: the others need only wait.
  enum class Roll { kUnderWay, kOver, kOfAnother };

  // Held while the thread talks to the store, which may never answer.
  class StoreCall {
   public:
    explicit StoreCall(Core& core) : core_(core) { set(Clock::now()); }
    ~StoreCall() { set(std::nullopt); }
    StoreCall(const StoreCall&) = delete;
    StoreCall& operator=(const StoreCall&) = delete;

   private:
    void set(std::optional<Clock::time_point> since) {
      const std::lock_guard<std::mutex> lock(core_.mutex);
      core_.inStoreSince = since;
    }
    Core& core_;
  };

  Core(GroupIdentity identity, c10::intrusive_ptr<c10d::Store> sharedStore, std::vector<uint64_t> ranks,
       milliseconds storePatience);
  ~Core() { FlightRecorder::instance().endGroup(recorderGroup); }
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  void startThread();
  void run() noexcept;
  void step();
  // Connects if need be. A store that is gone can take its whole timeout, minutes, to say so: another thread asks it.
  [[nodiscard]] bool isConnected();
  // Drops the connection, in which an answer may be left over, and says when to try again.
  void noteTrouble(const std::string& text, bool isOver = true);
  void noteRecovery();
  // Why there is no connection. Under the mutex.
  [[nodiscard]] std::string whyCutOff() const;
  // Whether it is time to look at the store again.
  [[nodiscard]] bool isTimeToLook();
  void look();
  void answerRollCall();
  void collectAnswers();
  void passOnReport();
  void inspectOperations();
  void inspect(const std::string& track, const Running& operation);
  void endOverdue(const std::string& track, const Running& operation);
  void warn(const std::string& track, const Running& operation, Roll roll);
  // Calls the roll, unless that has been done since `notBefore`, and lately. From `takeOverAt` on also in the place of
  // another rank.
  Roll askAll(Clock::time_point notBefore, Clock::time_point takeOverAt);
  [[nodiscard]] bool isAnothersTurn(Clock::time_point notBefore, Clock::time_point takeOverAt) const;
  void setFailure(const Failure& failure);
  // Where there is no store to agree in.
  void failAlone(const std::string& message);
  // From now on this rank does without the store.
  void giveUpStore(const std::string& why);
  // Under the mutex.
  [[nodiscard]] bool isIdle() const;
  [[nodiscard]] std::vector<Activity> ownActivities();
  [[nodiscard]] std::string attendance(const std::string& track, const Running& operation);
  [[nodiscard]] std::string messageOfFailure() const;

  const GroupIdentity group;
  const c10::intrusive_ptr<c10d::Store> store;
  const uint64_t globalRank;
  const uint64_t recorderGroup;
  const milliseconds warnAfter;
  const milliseconds busyLook;
  const milliseconds idleLook;
  const milliseconds storePatience;

  std::mutex mutex;
  std::condition_variable changed;
  std::vector<TrackState> tracks;
  Token nextToken = 1;
  std::optional<Report> report;
  std::optional<Failure> failure;
  // Since when the thread has been talking to the store, if it is.
  std::optional<Clock::time_point> inStoreSince;
  // While the store is in trouble.
  std::optional<Trouble> trouble;
  // Why the ranks will never again agree on anything; empty while they may.
  std::string whyAlone;
  std::thread thread;
  bool isStarted = false;
  bool isStopping = false;
  bool hasEnded = false;

  // Of the thread alone. The board is null while there is no connection.
  std::unique_ptr<FailureBoard> board;
  // `error` where there is no board: a text, for an exception would live on two threads.
  struct Connection {
    std::unique_ptr<FailureBoard> board;
    std::string error;
  };
  std::future<Connection> connecting;
  Clock::time_point connectingSince;
  bool hasWarnedOfStore = false;
  RollCall rollCall;
  int64_t answered = 0;
  Clock::time_point rollCallSeen;
  // When another rank was faster in calling the roll.
  Clock::time_point outrunAt;
  Clock::time_point lastLook;
};

GroupHealth::Core::Core(GroupIdentity identity, c10::intrusive_ptr<c10d::Store> sharedStore,
                        std::vector<uint64_t> ranks, milliseconds patienceWithStore)
    : group(std::move(identity)),
      store(std::move(sharedStore)),
      globalRank(ranks.at(group.rank)),
      recorderGroup(FlightRecorder::instance().addGroup(
          {.name = group.name, .rank = group.rank, .size = group.size, .globalRanks = std::move(ranks)})),
      warnAfter(config::warnAfter()),
      busyLook(std::max(kBusyLook, group.size * kLookPerRank)),
      idleLook(std::max(kIdleLook, group.size * kLookPerRank)),
      storePatience(patienceWithStore) {
  if (!store) whyAlone = "the ranks have no store in common";
}

// Under the mutex.
void GroupHealth::Core::startThread() {
  if (isStarted || isStopping || !store || group.size == 1) return;
  thread = std::thread([self = shared_from_this()] { self->run(); });
  isStarted = true;
}

void GroupHealth::Core::run() noexcept {
  c10::setThreadName("bagua_health");
  std::unique_lock<std::mutex> lock(mutex);
  // What there is to report is passed on also after a stop, if the store works.
  while (!failure && !(isStopping && (!report || trouble || !whyAlone.empty()))) {
    lock.unlock();
    try {
      step();
    } catch (...) {
      giveUpStore(messageOf(std::current_exception()));
    }
    lock.lock();
    if (failure) break;
    // A report is passed on at once; otherwise it is the clock that counts.
    const bool hadReport = report.has_value();
    const bool wasStopping = isStopping;
    changed.wait_for(lock, hadReport ? kReportTick : kTick,
                     [&] { return failure || isStopping != wasStopping || report.has_value() != hadReport; });
  }
  lock.unlock();
  board.reset();
  lock.lock();
  hasEnded = true;
  changed.notify_all();
}

void GroupHealth::Core::step() {
  bool isAlone = false;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    isAlone = !whyAlone.empty();
  }
  if (!isAlone) {
    try {
      if (isConnected()) {
        const StoreCall call(*this);
        if (isTimeToLook()) look();
        passOnReport();
      }
    } catch (...) {
      noteTrouble("the store does not answer: " + messageOf(std::current_exception()));
    }
  }
  inspectOperations();
}

bool GroupHealth::Core::isConnected() {
  if (board) return true;
  if (!connecting.valid()) {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      if (trouble && Clock::now() < trouble->nextTry) return false;
    }
    std::promise<Connection> connected;
    connecting = connected.get_future();
    connectingSince = Clock::now();
    std::thread([shared = store, rank = group.rank, connected = std::move(connected)]() mutable {
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
  if (connecting.wait_for(kTick) == std::future_status::ready) {
    auto connection = connecting.get();
    TORCH_CHECK_WITH(DistStoreError, connection.board != nullptr, connection.error);
    board = std::move(connection.board);
    lastLook = {};
    return true;
  }
  if (Clock::now() - connectingSince >= kStoreTime) noteTrouble("the store has not answered", /*isOver=*/false);
  return false;
}

void GroupHealth::Core::noteTrouble(const std::string& text, bool isOver) {
  board.reset();
  const auto now = Clock::now();
  bool isGone = false;
  bool isInUse = false;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!trouble) trouble.emplace(Trouble{.since = now, .pause = {}, .nextTry = {}, .text = {}});
    if (isOver) trouble->pause = std::clamp(trouble->pause * 2, kShortestPause, kLongestPause);
    trouble->nextTry = now + trouble->pause;
    trouble->text = text;
    isGone = now - trouble->since >= storePatience;
    isInUse = !isIdle();
  }
  changed.notify_all();
  if (isGone) return giveUpStore(text);
  // Not to an idle rank: the process that holds the store may have come to its end before this one.
  if (!isInUse || std::exchange(hasWarnedOfStore, true)) return;
  LOG(WARNING) << "bagua: rank " << group.rank << " of " << group.size << ", group '" << group.name << "': " << text
               << ". It is tried again for " << storePatience.count() << " ms";
}

void GroupHealth::Core::noteRecovery() {
  const std::lock_guard<std::mutex> lock(mutex);
  trouble.reset();
}

std::string GroupHealth::Core::whyCutOff() const {
  if (!whyAlone.empty()) return whyAlone;
  if (hasEnded) return "the group has been shut down";
  return trouble ? trouble->text : "the store has not answered";
}

bool GroupHealth::Core::isTimeToLook() {
  const auto now = Clock::now();
  bool isBusy = false;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    isBusy = report.has_value() || std::any_of(tracks.begin(), tracks.end(), [&](const TrackState& track) {
               return !track.running.empty() && now - track.running.front().begun >= kTick;
             });
  }
  const bool isAsking = rollCall.number != 0 && !rollCall.isOver();
  if (now - lastLook < (isBusy || isAsking ? busyLook : idleLook)) return false;
  lastLook = now;
  return true;
}

void GroupHealth::Core::look() {
  const auto found = board->firstFailure();
  noteRecovery();
  if (found) return setFailure(*found);
  answerRollCall();
  collectAnswers();
}

void GroupHealth::Core::answerRollCall() {
  const int64_t latest = board->latestRollCall();
  if (latest == answered) return;
  board->answer(latest, encode(ownActivities()));
  answered = latest;
  rollCallSeen = Clock::now();
}

void GroupHealth::Core::collectAnswers() {
  if (rollCall.number == 0 || rollCall.silent.empty()) return;
  for (const auto& [rank, text] : board->answers(rollCall.number, rollCall.silent)) {
    rollCall.answers[rank] = decodeActivities(text);
  }
}

GroupHealth::Core::Roll GroupHealth::Core::askAll(Clock::time_point notBefore, Clock::time_point takeOverAt) {
  if (!board) return Roll::kOver;
  const auto now = Clock::now();
  const auto isRecent = [&](Clock::time_point asked) {
    return asked >= notBefore && now - asked < kRollCallLead + kAnswerTime;
  };
  if (rollCall.number == 0 || !isRecent(rollCall.asked)) {
    if (isAnothersTurn(notBefore, takeOverAt)) return Roll::kOfAnother;
    // Somebody may have asked since the last look.
    answerRollCall();
    if (isAnothersTurn(notBefore, takeOverAt)) return Roll::kOfAnother;
    const auto number = board->callTheRoll();
    if (!number) {
      outrunAt = now;
      return Roll::kOfAnother;
    }
    // In the place of another rank, whose question has been answered by now.
    const bool isAnswered = answered > 0 && isRecent(rollCallSeen);
    rollCall = {.number = isAnswered ? answered : *number,
                .asked = isAnswered ? rollCallSeen : now,
                .answers = {},
                .silent = {}};
    for (int rank = 0; rank < group.size; ++rank) {
      if (rank != group.rank) rollCall.silent.push_back(rank);
    }
    lastLook = {};
    if (isAnswered) collectAnswers();
  }
  return rollCall.isOver() ? Roll::kOver : Roll::kUnderWay;
}

bool GroupHealth::Core::isAnothersTurn(Clock::time_point notBefore, Clock::time_point takeOverAt) const {
  const auto now = Clock::now();
  const auto asked = std::max(rollCallSeen, outrunAt);
  if (asked < notBefore || now - asked >= kRollCallLead + kAnswerTime) return false;
  return now < takeOverAt || now - asked < kTurnTime;
}

std::vector<Activity> GroupHealth::Core::ownActivities() {
  std::vector<Activity> activities;
  const std::lock_guard<std::mutex> lock(mutex);
  for (const auto& track : tracks) {
    Activity activity{.track = track.name, .completed = {}, .current = {}};
    if (track.completed) activity.completed = momentOf(*track.completed, track.completedAt);
    const size_t before = activities.size();
    for (const auto& running : track.running) {
      if (running.kind != Track::Kind::kProgram) continue;
      activity.current = momentOf(running.program, running.begun);
      activities.push_back(activity);
    }
    if (activities.size() > before) continue;
    // A message that is waited for tells less about where the rank is than a program.
    if (!track.running.empty()) activity.current = momentOf(track.running[0].program, track.running[0].begun);
    activities.push_back(std::move(activity));
  }
  return activities;
}

void GroupHealth::Core::passOnReport() {
  std::optional<Report> due;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    due = report;
  }
  if (!due) return;
  std::string message = due->message;
  if (due->isSymptom) {
    const Roll roll = askAll(due->since, due->since + kCauseTime + kTurnTime);
    const auto waited = Clock::now() - due->since;
    if (waited < kCauseTime || (roll == Roll::kOfAnother && waited < kCauseTime + 2 * kTurnTime)) return;
    if (roll != Roll::kOfAnother) {
      collectAnswers();
      message += Attendance{.waiting = {}, .absent = {}, .silent = rollCall.silent}.describe();
    }
  }
  const Failure first = board->report(message);
  if (!due->isAbort && first.rank == group.rank) std::this_thread::sleep_for(kReadingTime);
  setFailure(first);
}

std::string GroupHealth::Core::attendance(const std::string& track, const Running& operation) {
  const bool isMessage = operation.kind == Track::Kind::kMessage;
  auto found = attendanceOf(operation.program, isMessage, track, rollCall.answers, rollCall.silent);
  if (isMessage) {
    // Only the other end matters.
    const int peer = operation.program.peer;
    std::erase_if(found.absent, [&](const auto& entry) { return peer >= 0 && entry.first != peer; });
    std::erase_if(found.silent, [&](int rank) { return peer >= 0 && rank != peer; });
  }
  return found.describe();
}

void GroupHealth::Core::inspectOperations() {
  std::vector<std::pair<std::string, Running>> slow;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (failure) return;
    for (const auto& track : tracks) {
      for (const auto& operation : track.running) slow.emplace_back(track.name, operation);
    }
  }
  for (const auto& [track, operation] : slow) inspect(track, operation);
}

void GroupHealth::Core::inspect(const std::string& track, const Running& operation) {
  const auto now = Clock::now();
  const auto lead = std::min(kRollCallLead, operation.timeout / 2);
  if (now - operation.begun < kTick && operation.timeout > kTick) return;
  try {
    const StoreCall call(*this);
    const auto end = operation.begun + operation.timeout;
    if (now >= end - lead) {
      if (askAll(operation.begun, end + kTurnTime) == Roll::kOver && operation.isOverdue())
        endOverdue(track, operation);
    } else if (warnAfter.count() > 0 && now >= operation.nextWarning) {
      const Roll roll = askAll(operation.begun, end);
      if (roll != Roll::kUnderWay) warn(track, operation, roll);
    }
  } catch (...) {
    noteTrouble("the store does not answer: " + messageOf(std::current_exception()));
    if (operation.isOverdue()) endOverdue(track, operation);
  }
}

void GroupHealth::Core::endOverdue(const std::string& track, const Running& operation) {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    // What is about to be reported ends this one too.
    if (failure || (report && board)) return;
    // Done after all.
    const auto isIt = [&](const Running& running) { return running.token == operation.token; };
    const bool isRunning = std::any_of(tracks.begin(), tracks.end(), [&](const TrackState& state) {
      return std::any_of(state.running.begin(), state.running.end(), isIt);
    });
    if (!isRunning) return;
  }
  const std::string message =
      c10::str(describe(operation.program), " on rank ", group.rank, " of ", group.size, ", group '", group.name,
               "' failed: Timed out after ", operation.timeout.count(), " ms.");
  if (!board) return failAlone(message);
  const Failure first = board->report(message + attendance(track, operation));
  if (first.rank == group.rank) std::this_thread::sleep_for(kReadingTime);
  setFailure(first);
}

void GroupHealth::Core::warn(const std::string& track, const Running& operation, Roll roll) {
  const auto waited = std::chrono::duration_cast<milliseconds>(Clock::now() - operation.begun);
  {
    const std::lock_guard<std::mutex> lock(mutex);
    for (auto& state : tracks) {
      for (auto& running : state.running) {
        if (running.token == operation.token) running.nextWarning = running.begun + waited * kWarningInterval;
      }
    }
  }
  // The rank that has asked tells for all that wait.
  if (roll == Roll::kOfAnother) return;
  LOG(WARNING) << "bagua: rank " << group.rank << " of " << group.size << ", group '" << group.name << "', has been in "
               << describe(operation.program) << " for " << waited.count() << " ms of the " << operation.timeout.count()
               << " ms that it may take." << attendance(track, operation);
}

std::string GroupHealth::Core::messageOfFailure() const {
  if (failure->rank == group.rank) return failure->message;
  return c10::str("rank ", failure->rank, " failed first: ", failure->message);
}

void GroupHealth::Core::failAlone(const std::string& message) {
  std::string why;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    why = whyCutOff();
  }
  setFailure({group.rank, c10::str(message, " (The other ranks could not be told: ", why, ")")});
}

void GroupHealth::Core::giveUpStore(const std::string& why) {
  board.reset();
  {
    const std::lock_guard<std::mutex> lock(mutex);
    whyAlone = why;
    report.reset();
  }
  changed.notify_all();
  LOG(WARNING) << "bagua: rank " << group.rank << " of " << group.size << ", group '" << group.name
               << "', goes on without the store of the group: " << why
               << ". It no longer hears of failures on other ranks, nor they of its own, and a timeout does not name "
               << "the ranks that are missing";
}

bool GroupHealth::Core::isIdle() const {
  return std::all_of(tracks.begin(), tracks.end(), [](const TrackState& track) { return track.running.empty(); });
}

void GroupHealth::Core::setFailure(const Failure& first) {
  std::vector<Track::Abort> aborts;
  std::string message;
  bool isInUse = false;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (failure) return;
    failure = first;
    report.reset();
    message = messageOfFailure();
    isInUse = !isIdle();
    for (auto& track : tracks) {
      if (track.abort) aborts.push_back(std::move(track.abort));
    }
  }
  changed.notify_all();
  for (const auto& abort : aborts) abort(message);
  aborts.clear();
  // After those who wait have been released: a file system can be slow.
  std::string file;
  try {
    file = FlightRecorder::instance().write(globalRank);
  } catch (...) {
    LOG(WARNING) << "bagua: the last operations could not be written: " << messageOf(std::current_exception());
  }
  const std::string text = c10::str("bagua: rank ", group.rank, ", group '", group.name, "': ", message,
                                    file.empty() ? "" : c10::str(" The last operations of this rank are in ", file));
  // To an idle rank it is no error before it communicates again: its peers may be about to end, as it may be itself.
  if (isInUse) {
    LOG(ERROR) << text;
  } else {
    LOG(INFO) << text;
  }
}

GroupHealth::GroupHealth(const GroupIdentity& group, c10::intrusive_ptr<c10d::Store> store,
                         std::vector<uint64_t> globalRanks, std::chrono::milliseconds storePatience)
    : core_(std::make_shared<Core>(group, std::move(store), orAll(std::move(globalRanks), group.size), storePatience)) {
}

GroupHealth::~GroupHealth() { stop(); }

std::shared_ptr<GroupHealth::Track> GroupHealth::addTrack(const std::string& name) {
  const std::lock_guard<std::mutex> lock(core_->mutex);
  core_->tracks.push_back({.name = name, .running = {}, .completed = {}, .completedAt = {}, .abort = {}});
  return std::make_shared<Track>(core_, core_->tracks.size() - 1);
}

void GroupHealth::stop() {
  std::thread thread;
  {
    std::unique_lock<std::mutex> lock(core_->mutex);
    core_->isStopping = true;
    core_->changed.notify_all();
    thread = std::move(core_->thread);
    if (!thread.joinable()) return;
    core_->changed.wait_for(lock, kStopTime, [this] { return core_->hasEnded; });
    if (!core_->hasEnded || thread.get_id() == std::this_thread::get_id()) return thread.detach();
  }
  thread.join();
}

void GroupHealth::Track::onFailure(Abort abort) {
  std::string cause;
  {
    const std::lock_guard<std::mutex> lock(core_->mutex);
    if (!core_->failure) {
      core_->tracks[index_].abort = std::move(abort);
      return;
    }
    cause = core_->messageOfFailure();
  }
  abort(cause);
}

GroupHealth::Track::Token GroupHealth::Track::begin(const Operation& operation, const ProgramFingerprint& program,
                                                    Kind kind) {
  Core::Running running;
  running.program = program;
  running.kind = kind;
  running.begun = Clock::now();
  running.timeout = operation.timeout;
  running.recorded = FlightRecorder::instance().begin(core_->recorderGroup, operation, program);
  running.nextWarning = running.begun + core_->warnAfter;
  const std::lock_guard<std::mutex> lock(core_->mutex);
  core_->startThread();
  running.token = core_->nextToken++;
  core_->tracks[index_].running.push_back(running);
  return running.token;
}

void GroupHealth::Track::end(Token token, bool isSuccess) {
  uint64_t recorded = 0;
  {
    const std::lock_guard<std::mutex> lock(core_->mutex);
    auto& track = core_->tracks[index_];
    const auto found = std::find_if(track.running.begin(), track.running.end(),
                                    [&](const Core::Running& running) { return running.token == token; });
    if (found == track.running.end()) return;
    recorded = found->recorded;
    const bool isLatest = !track.completed || track.completed->sequence <= found->program.sequence;
    if (isSuccess && found->kind == Kind::kProgram && isLatest) {
      track.completed = found->program;
      track.completedAt = Clock::now();
    }
    track.running.erase(found);
  }
  FlightRecorder::instance().end(recorded, isSuccess);
}

std::exception_ptr GroupHealth::Track::explain(const std::exception_ptr& error, const Operation& operation) {
  auto& core = *core_;
  auto own = withContext(error, operation, core.group);
  std::unique_lock<std::mutex> lock(core.mutex);
  if (!core.isStarted) return own;
  if (!core.failure && core.whyAlone.empty()) {
    if (!core.report) {
      core.report.emplace(
          Core::Report{.message = messageOf(own), .isSymptom = isSymptom(error), .since = Clock::now()});
      core.changed.notify_all();
    }
    const auto isSettled = [&] { return core.failure || !core.whyAlone.empty() || core.hasEnded; };
    const auto end = Clock::now() + kAgreementTime;
    // In vain where the store has not answered for some time already.
    const auto isStuck = [&] {
      const auto now = Clock::now();
      return (core.inStoreSince && now - *core.inStoreSince >= kStoreTime) ||
             (core.trouble && now - core.trouble->since >= kTroubleTime);
    };
    while (!isSettled() && !isStuck() && Clock::now() < end) core.changed.wait_for(lock, kTick);
  }
  if (core.failure) return withContext(makeError(core.messageOfFailure()), operation, core.group);
  return makeError(c10::str(messageOf(own), " (The other ranks could not be told: ", core.whyCutOff(), ")"));
}

void GroupHealth::Track::reportAbort(const std::string& reason) {
  {
    const std::lock_guard<std::mutex> lock(core_->mutex);
    if (!core_->isStarted || core_->failure || core_->report) return;
    core_->report.emplace(Core::Report{.message = c10::str("rank ", core_->group.rank, " of ", core_->group.size,
                                                           ", group '", core_->group.name, "': ", reason),
                                       .isAbort = true,
                                       .since = Clock::now()});
  }
  core_->changed.notify_all();
}

milliseconds GroupHealth::Track::patience(milliseconds timeout) const {
  const bool isLookedAfter = core_->store && core_->group.size > 1 && timeout.count() > 0;
  return isLookedAfter ? kPatience : milliseconds(0);
}

}  // namespace bagua
