// SPDX-License-Identifier: Apache-2.0
#include "backend/health/group_health.h"

#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>
#include <mutex>
#include <regex>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

#include "backend/health/failure_board.h"
#include "backend/health/health_times.h"
#include "backend/operation/peer_errors.h"

namespace bagua {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// Nothing here takes that long, unless it hangs.
constexpr std::chrono::seconds kLimit{20};

// One rank of a group, with one executor.
struct Rank {
  Rank(int rank, int size, const c10::intrusive_ptr<c10d::Store>& store,
       milliseconds storePatience = GroupHealth::kStorePatience, bool survivesDeaths = false)
      : group{.name = "group", .rank = rank, .size = size},
        health(group, store, {}, storePatience, survivesDeaths),
        log(health.addLog("cpu")) {
    // The health's thread can outlive the rank, see AStoreThatDoesNotAnswerHoldsNobodyUp.
    log->onFailure([aborted = aborted](const std::string& cause) { aborted->set_value(cause); });
  }

  std::string causeOfAbort() {
    auto cause = aborted->get_future();
    TORCH_CHECK(cause.wait_for(kLimit) == std::future_status::ready, "rank ", group.rank, " was never told");
    return cause.get();
  }

  GroupIdentity group;
  const std::shared_ptr<std::promise<std::string>> aborted = std::make_shared<std::promise<std::string>>();
  GroupHealth health;
  std::shared_ptr<OperationLog> log;
};

Operation allReduce(uint64_t sequence, milliseconds timeout = std::chrono::minutes(5)) {
  Operation operation{.name = "all_reduce", .dtype = at::kFloat, .numel = 4, .timeout = timeout};
  operation.sequence = sequence;
  return operation;
}

void beginAllReduce(const Rank& first, const Rank& second) {
  for (const auto* rank : {&first, &second}) rank->log->begin(allReduce(7));
}

template <typename Error>
std::exception_ptr errorOf(const std::string& message) {
  return std::make_exception_ptr(Error({__func__, __FILE__, __LINE__}, message));
}

class GroupHealthTest : public ::testing::Test {
 protected:
  // Failures on purpose leave no files.
  static void SetUpTestSuite() { ::setenv("TORCH_FR_DUMP_ON_TIMEOUT", "0", 1); }

  const c10::intrusive_ptr<c10d::Store> store_ = c10::make_intrusive<c10d::HashStore>();
};

TEST_F(GroupHealthTest, AFailureReachesTheOthersWithItsText) {
  Rank first(0, 2, store_);
  Rank second(1, 2, store_);
  beginAllReduce(first, second);
  const std::string own = messageOf(second.log->explain(errorOf<c10::Error>("out of memory"), allReduce(7)));
  EXPECT_EQ(own, "all_reduce #7 (Float[4]) on rank 1 of 2, group 'group' failed: out of memory");
  EXPECT_EQ(first.causeOfAbort(), "rank 1 failed first: " + own);
  // Later errors of any rank name the same cause.
  EXPECT_EQ(messageOf(first.log->explain(errorOf<PeerLeftError>("rank 1 has left"), allReduce(7))),
            "all_reduce #7 (Float[4]) on rank 0 of 2, group 'group' failed: rank 1 failed first: " + own);
}

TEST_F(GroupHealthTest, ASymptomWaitsForTheRankThatKnowsTheCause) {
  Rank first(0, 2, store_);
  Rank second(1, 2, store_);
  beginAllReduce(first, second);
  auto seen = std::async(std::launch::async, [&] {
    return messageOf(first.log->explain(errorOf<PeerLeftError>("rank 1 has left the exchange"), allReduce(7)));
  });
  const std::string cause = messageOf(second.log->explain(errorOf<c10::Error>("out of memory"), allReduce(7)));
  EXPECT_THAT(cause, HasSubstr("failed: out of memory"));
  EXPECT_THAT(seen.get(), HasSubstr("rank 1 failed first: " + cause));
}

TEST_F(GroupHealthTest, WhereRanksGoOnWithoutOneThatDiesNobodyWaitsForTheOthersWords) {
  Rank first(0, 2, store_, GroupHealth::kStorePatience, /*survivesDeaths=*/true);
  Rank second(1, 2, store_, GroupHealth::kStorePatience, /*survivesDeaths=*/true);
  beginAllReduce(first, second);
  const auto begin = std::chrono::steady_clock::now();
  const auto seen = messageOf(first.log->explain(errorOf<PeerDiedError>("rank 2 has ended"), allReduce(7)));
  EXPECT_THAT(seen, HasSubstr("on rank 0 of 2, group 'group' failed: rank 2 has ended"));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kReadingTime);
  EXPECT_THAT(second.causeOfAbort(), HasSubstr("failed: rank 2 has ended"));
  // Nor for a cause that nobody knows at once: their own words will do, and are no sign of trouble with the store.
  Rank other(0, 2, c10::make_intrusive<c10d::HashStore>(), GroupHealth::kStorePatience, /*survivesDeaths=*/true);
  other.log->begin(allReduce(7));
  EXPECT_THAT(messageOf(other.log->explain(errorOf<PeerLeftError>("rank 1 has left"), allReduce(7))),
              AllOf(HasSubstr("failed: rank 1 has left"), ::testing::Not(HasSubstr("could not be told"))));
  EXPECT_THAT(other.causeOfAbort(), HasSubstr("rank 1 (does not answer"));
}

TEST_F(GroupHealthTest, ASymptomWithoutACauseNamesTheRankThatIsSilent) {
  Rank first(0, 3, store_);
  Rank second(1, 3, store_);  // the third has ended
  beginAllReduce(first, second);
  const auto seen = messageOf(first.log->explain(errorOf<c10::DistNetworkError>("connection closed"), allReduce(7)));
  EXPECT_THAT(seen, AllOf(HasSubstr("connection closed"), HasSubstr("rank 2 (does not answer"),
                          ::testing::Not(HasSubstr("rank 1 ("))));
  EXPECT_THAT(second.causeOfAbort(), StartsWith("rank 0 failed first: "));
}

TEST_F(GroupHealthTest, ATimeoutNamesWhoHasNotCome) {
  Rank first(0, 2, store_);
  Rank second(1, 2, store_);
  second.log->end(second.log->begin(allReduce(6)), true);
  first.log->begin(allReduce(7, milliseconds(1500)));
  EXPECT_THAT(first.causeOfAbort(),
              AllOf(StartsWith("all_reduce #7 (Float[4]) on rank 0 of 2, group 'group' failed: Timed out waiting for "
                               "the other ranks: timed out after 1500 ms."),
                    HasSubstr("rank 1 (has nothing under way, last completed all_reduce #6 (Float[4])")));
}

TEST_F(GroupHealthTest, AnOperationThatEndsInTimeIsLeftAlone) {
  Rank first(0, 2, store_);
  Rank second(1, 2, store_);
  first.log->end(first.log->begin(allReduce(7, milliseconds(400))), true);
  // Longer than the timeout, and than the ranks' looks at the store.
  EXPECT_EQ(first.aborted->get_future().wait_for(milliseconds(1500)), std::future_status::timeout);
}

TEST_F(GroupHealthTest, AnAbortReachesTheOthers) {
  Rank first(0, 2, store_);
  Rank second(1, 2, store_);
  beginAllReduce(first, second);
  first.log->reportAbort("the group was aborted");
  first.health.stop();
  EXPECT_THAT(second.causeOfAbort(),
              HasSubstr("rank 0 of 2, group 'group': the group was aborted (Connection closed by peer)"));
}

TEST_F(GroupHealthTest, AnExecutorMadeAfterTheFailureIsEndedAtOnce) {
  Rank first(0, 2, store_);
  Rank second(1, 2, store_);
  beginAllReduce(first, second);
  second.log->explain(errorOf<c10::Error>("out of memory"), allReduce(7));
  const std::string cause = first.causeOfAbort();
  std::string seen;
  first.health.addLog("cuda")->onFailure([&seen](const std::string& text) { seen = text; });
  EXPECT_EQ(seen, cause);
}

// Counts what the ranks read of each other's answers to roll calls.
class CountingStore final : public c10d::HashStore {
 public:
  c10::intrusive_ptr<c10d::Store> clone() override { return c10::intrusive_ptr<c10d::Store>::reclaim_copy(this); }
  bool check(const std::vector<std::string>& keys) override {
    count(keys);
    return HashStore::check(keys);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    count({key});
    return HashStore::get(key);
  }
  [[nodiscard]] int answersRead() const { return answersRead_; }
  [[nodiscard]] int requests() const { return requests_; }

 private:
  void count(const std::vector<std::string>& keys) {
    ++requests_;
    for (const auto& key : keys) answersRead_ += key.find("answer/") != std::string::npos ? 1 : 0;
  }
  std::atomic<int> answersRead_ = 0;
  std::atomic<int> requests_ = 0;
};

TEST_F(GroupHealthTest, TheGroupsOfAProcessAskTheStoreTogether) {
  constexpr int kGroups = 8;
  const auto store = c10::make_intrusive<CountingStore>();
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int group = 0; group < kGroups; ++group) {
    const auto part = c10::make_intrusive<c10d::PrefixStore>("group " + std::to_string(group), store);
    ranks.push_back(std::make_unique<Rank>(0, 2, part));
    ranks.back()->log->end(ranks.back()->log->begin(allReduce(1)), true);
  }
  // The first looks of each.
  std::this_thread::sleep_for(milliseconds(700));
  const int before = store->requests();
  std::this_thread::sleep_for(milliseconds(2200));
  // Twice a second, for all.
  EXPECT_LE(store->requests() - before, 5);
  EXPECT_GE(store->requests() - before, 1);
  // What comes is seen by the group that it is for, and by no other.
  FailureBoard(*c10::make_intrusive<c10d::PrefixStore>("group 3", store), 1).report("out of memory");
  EXPECT_EQ(ranks[3]->causeOfAbort(), "rank 1 failed first: out of memory");
  auto other = ranks[4]->aborted->get_future();
  EXPECT_EQ(other.wait_for(milliseconds(700)), std::future_status::timeout);
}

// All but the last wait in `operation`; a few may learn from the others before they have found out themselves.
std::string causeForAll(std::vector<std::unique_ptr<Rank>>& ranks) {
  std::string cause;
  for (size_t rank = 0; rank + 1 < ranks.size(); ++rank) {
    const std::string seen = ranks[rank]->causeOfAbort();
    const auto begin = seen.find("failed first: ");
    const std::string own = begin == std::string::npos ? seen : seen.substr(begin + std::strlen("failed first: "));
    if (cause.empty()) cause = own;
    EXPECT_EQ(own, cause);
  }
  return cause;
}

TEST_F(GroupHealthTest, ATimeoutOfManyRanksReadsTheAnswersOnce) {
  constexpr int kRanks = 24;
  const auto store = c10::make_intrusive<CountingStore>();
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int rank = 0; rank < kRanks; ++rank) ranks.push_back(std::make_unique<Rank>(rank, kRanks, store));
  ranks.back()->log->end(ranks.back()->log->begin(allReduce(6)), true);
  for (int rank = 0; rank + 1 < kRanks; ++rank) ranks[rank]->log->begin(allReduce(7, milliseconds(2500)));
  const std::string cause = causeForAll(ranks);
  EXPECT_THAT(cause, AllOf(HasSubstr("timed out after 2500 ms"),
                           HasSubstr("Not there: rank 23 (has nothing under way, last completed all_reduce #6")));
  // Each answer is looked for until it is there, and read once. Every rank for itself would be 24 times that.
  EXPECT_LE(store->answersRead(), 8 * kRanks);
}

TEST_F(GroupHealthTest, SymptomsOnManyRanksReadTheAnswersOnce) {
  constexpr int kRanks = 24;
  const auto store = c10::make_intrusive<CountingStore>();
  std::vector<std::unique_ptr<Rank>> ranks;
  // The last one has ended.
  for (int rank = 0; rank + 1 < kRanks; ++rank) ranks.push_back(std::make_unique<Rank>(rank, kRanks, store));
  for (const auto& rank : ranks) rank->log->begin(allReduce(7));
  std::vector<std::thread> witnesses;
  std::vector<std::string> seen(ranks.size());
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    witnesses.emplace_back([&, rank] {
      seen[rank] =
          messageOf(ranks[rank]->log->explain(errorOf<c10::DistNetworkError>("connection closed"), allReduce(7)));
    });
  }
  for (auto& witness : witnesses) witness.join();
  for (const auto& text : seen) EXPECT_THAT(text, HasSubstr("rank 23 (does not answer"));
  // Far fewer than if each had read them all, and the one that does not answer five times a second.
  EXPECT_LT(store->answersRead(), kRanks * kRanks);
}

// A rank may end between its question and its report.
TEST_F(GroupHealthTest, AnotherRankTakesThePlaceOfOneThatAskedAndEnded) {
  Rank first(0, 3, store_);
  Rank second(1, 3, store_);
  FailureBoard third(*store_, 2);
  first.log->begin(allReduce(7, milliseconds(2500)));
  second.log->begin(allReduce(7, milliseconds(2500)));
  ASSERT_TRUE(third.callTheRoll());
  const std::string seen = first.causeOfAbort();
  EXPECT_THAT(seen, AllOf(HasSubstr("timed out after 2500 ms"), HasSubstr("rank 2 (does not answer")));
}

// A store whose server has gone away.
class DeadStore final : public c10d::HashStore {
 public:
  c10::intrusive_ptr<c10d::Store> clone() override { C10_THROW_ERROR(DistNetworkError, "Connection reset by peer"); }
};

TEST_F(GroupHealthTest, AStoreThatIsGoneHidesNoError) {
  Rank rank(0, 2, c10::make_intrusive<DeadStore>());
  rank.log->begin(allReduce(0));
  EXPECT_THAT(messageOf(rank.log->explain(errorOf<c10::Error>("out of memory"), allReduce(0))),
              AllOf(HasSubstr("failed: out of memory"), HasSubstr("Connection reset by peer")));
  rank.log->begin(allReduce(1, milliseconds(100)));
  EXPECT_THAT(rank.causeOfAbort(), HasSubstr("timed out after 100 ms"));
}

// A store that throws as long as it is told to.
class TroubledStore final : public c10d::HashStore {
 public:
  c10::intrusive_ptr<c10d::Store> clone() override { return c10::intrusive_ptr<c10d::Store>::reclaim_copy(this); }
  bool check(const std::vector<std::string>& keys) override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (isInTrouble_) {
        ++refusals_;
        changed_.notify_all();
        C10_THROW_ERROR(DistNetworkError, "Connection reset by peer");
      }
    }
    return HashStore::check(keys);
  }
  void setTrouble(bool isInTrouble) { isInTrouble_ = isInTrouble; }
  bool waitForRefusals(int count) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, kLimit, [&] { return refusals_ >= count; });
  }
  [[nodiscard]] int refusals() const { return refusals_; }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> isInTrouble_ = true;
  std::atomic<int> refusals_ = 0;
};

TEST_F(GroupHealthTest, AStoreThatThrowsForAWhileIsUsedAgain) {
  const auto store = c10::make_intrusive<TroubledStore>();
  Rank first(0, 2, store);
  Rank second(1, 2, store);
  beginAllReduce(first, second);
  // More than once per rank.
  ASSERT_TRUE(store->waitForRefusals(6));
  store->setTrouble(false);
  const std::string cause = messageOf(second.log->explain(errorOf<c10::Error>("out of memory"), allReduce(7)));
  EXPECT_EQ(first.causeOfAbort(), "rank 1 failed first: " + cause);
}

TEST_F(GroupHealthTest, AFailureDuringTroubleWithTheStoreReachesTheOthersAfterIt) {
  const auto store = c10::make_intrusive<TroubledStore>();
  Rank first(0, 2, store);
  Rank second(1, 2, store);
  beginAllReduce(first, second);
  ASSERT_TRUE(store->waitForRefusals(2));
  // Whoever waits is not kept waiting until the trouble is over.
  EXPECT_THAT(messageOf(second.log->explain(errorOf<c10::Error>("out of memory"), allReduce(7))),
              AllOf(HasSubstr("out of memory"), HasSubstr("could not be told"), HasSubstr("Connection reset")));
  store->setTrouble(false);
  EXPECT_THAT(first.causeOfAbort(), HasSubstr("rank 1 failed first: all_reduce #7 (Float[4]) on rank 1 of 2"));
}

TEST_F(GroupHealthTest, AStoreThatGoesOnThrowingIsGivenUpWithOneLineThatSaysWhatIsLost) {
  ::testing::internal::CaptureStderr();
  const auto store = c10::make_intrusive<TroubledStore>();
  std::string seen;
  {
    Rank rank(0, 2, store, milliseconds(700));
    rank.log->begin(allReduce(7));
    rank.log->begin(allReduce(8, milliseconds(2500)));
    seen = rank.causeOfAbort();
  }
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(seen, AllOf(HasSubstr("timed out after 2500 ms"), HasSubstr("could not be told"),
                          HasSubstr("Connection reset by peer")));
  const std::regex line("goes on without the store[^\n]*no longer hears of failures on other ranks");
  EXPECT_EQ(std::distance(std::sregex_iterator(log.begin(), log.end(), line), std::sregex_iterator()), 1) << log;
  // 0.1, 0.3 and 0.7 s after the first.
  EXPECT_LE(store->refusals(), 5);
}

// A store that never answers, as behind a network that drops everything.
class SilentStore final : public c10d::HashStore {
 public:
  SilentStore(std::shared_future<void> end, std::promise<void>& gone) : end_(std::move(end)), gone_(gone) {}
  ~SilentStore() override { gone_.set_value(); }
  c10::intrusive_ptr<c10d::Store> clone() override {
    end_.wait();
    return c10::make_intrusive<c10d::HashStore>();
  }

 private:
  const std::shared_future<void> end_;
  std::promise<void>& gone_;
};

TEST_F(GroupHealthTest, AStoreThatDoesNotAnswerHoldsNobodyUp) {
  std::promise<void> end;
  std::promise<void> gone;
  const auto begun = std::chrono::steady_clock::now();
  {
    Rank rank(0, 2, c10::make_intrusive<SilentStore>(end.get_future().share(), gone));
    rank.log->begin(allReduce(0));
    EXPECT_THAT(messageOf(rank.log->explain(errorOf<c10::Error>("out of memory"), allReduce(0))),
                AllOf(HasSubstr("failed: out of memory"), HasSubstr("the store has not answered")));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begun, kLimit);
  end.set_value();
  EXPECT_EQ(gone.get_future().wait_for(kLimit), std::future_status::ready) << "the thread has not ended";
}

}  // namespace
}  // namespace bagua
