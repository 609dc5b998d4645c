// SPDX-License-Identifier: Apache-2.0
#include "kernels/share_out.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <chrono>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/intra_op_threads.h"

namespace bagua {
namespace {

using Part = std::pair<int64_t, int64_t>;

struct Seen {
  std::set<Part> parts;
  std::set<std::thread::id> threads;
};

Seen seenOf(int64_t count, int64_t grain) {
  Seen seen;
  std::mutex mutex;
  shareOut(count, grain, [&](int64_t begin, int64_t end) {
    const std::lock_guard<std::mutex> lock(mutex);
    seen.parts.emplace(begin, end);
    seen.threads.insert(std::this_thread::get_id());
  });
  return seen;
}

void expectWhole(const std::set<Part>& parts, int64_t count) {
  int64_t reached = 0;
  for (const auto& [begin, end] : parts) {
    EXPECT_EQ(begin, reached);
    EXPECT_LT(begin, end);
    reached = end;
  }
  EXPECT_EQ(reached, count);
}

TEST(ShareOut, GivesEachThreadAPart) {
  BAGUA_NEEDS_INTRA_OP_THREADS();
  const IntraOpThreads threads(3);
  for (const int64_t count : {3, 4, 7, 1000}) {
    const auto [parts, ids] = seenOf(count, 1);
    expectWhole(parts, count);
    EXPECT_EQ(ids.size(), parts.size());
    EXPECT_GE(parts.size(), 2U);
  }
}

TEST(ShareOut, TakesAThreadForEveryGrain) {
  BAGUA_NEEDS_INTRA_OP_THREADS();
  const IntraOpThreads threads(3);
  EXPECT_EQ(seenOf(100, 60).parts, (std::set<Part>{{0, 50}, {50, 100}}));
  EXPECT_EQ(seenOf(100, 100).parts, (std::set<Part>{{0, 100}}));
  EXPECT_TRUE(seenOf(0, 1).parts.empty());
}

TEST(ShareOut, StaysOnTheThreadThatIsToldTo) {
  BAGUA_NEEDS_INTRA_OP_THREADS();
  const IntraOpThreads threads(3);
  const StayOnThread outer;
  { const StayOnThread inner; }
  const auto [parts, ids] = seenOf(1000, 1);
  EXPECT_EQ(parts, (std::set<Part>{{0, 1000}}));
  EXPECT_EQ(ids, std::set<std::thread::id>{std::this_thread::get_id()});
}

TEST(ShareOut, OtherThreadsAreNotToldTo) {
  BAGUA_NEEDS_INTRA_OP_THREADS();
  const IntraOpThreads threads(3);
  const StayOnThread here;
  Seen seen;
  std::thread([&seen] { seen = seenOf(1000, 1); }).join();
  EXPECT_EQ(seen.threads.size(), 3U);
}

TEST(ShareOut, APartMayShareOutItself) {
  BAGUA_NEEDS_INTRA_OP_THREADS();
  const IntraOpThreads threads(3);
  std::mutex mutex;
  std::multiset<int64_t> counts;
  shareOut(30, 1, [&](int64_t begin, int64_t end) {
    shareOut(end - begin, 1, [&](int64_t first, int64_t last) {
      const std::lock_guard<std::mutex> lock(mutex);
      counts.insert(last - first);
    });
  });
  EXPECT_EQ(counts, (std::multiset<int64_t>{10, 10, 10}));
}

TEST(ShareOut, PassesErrorsOn) {
  BAGUA_NEEDS_INTRA_OP_THREADS();
  const IntraOpThreads threads(3);
  const auto failing = [](int64_t begin, int64_t /*end*/) {
    if (begin > 0) throw std::runtime_error("part " + std::to_string(begin));
  };
  EXPECT_THROW(shareOut(2, 1, failing), std::runtime_error);
}

}  // namespace
}  // namespace bagua
