// SPDX-License-Identifier: Apache-2.0
#include "backend/health/store_pulse.h"

#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "backend/health/failure_board.h"

namespace bagua {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kAlways{0};

// Each pulse stands for a process.
class StorePulseTest : public ::testing::Test {
 protected:
  const c10::intrusive_ptr<c10d::Store> store_ = c10::make_intrusive<c10d::HashStore>();
  StorePulse reader_;
  StorePulse writer_;
};

TEST_F(StorePulseTest, ABeatIsSeenWhateverThePrefix) {
  const auto seen = reader_.beats(*store_, kAlways);
  writer_.beat(*c10::make_intrusive<c10d::PrefixStore>("group", store_));
  EXPECT_NE(reader_.beats(*store_, kAlways), seen);
}

// Two processes have counted, and ended before anybody could see it; the one that comes next knows nothing of them.
TEST_F(StorePulseTest, BeatsAreSeenBehindThoseOfProcessesThatHaveEndedInTheMiddle) {
  const auto seen = reader_.beats(*store_, kAlways);
  store_->add("bagua/health/beats", 2);
  StorePulse late;
  late.beats(*store_, kAlways);
  late.beat(*store_);
  EXPECT_NE(reader_.beats(*store_, kAlways), seen);
}

TEST_F(StorePulseTest, ACounterThatSomebodyHasChangedKeepsNobody) {
  reader_.beats(*store_, kAlways);
  store_->add("bagua/health/beats", int64_t{1} << 40);
  const int64_t keys = store_->getNumKeys();
  writer_.beat(*store_);
  EXPECT_LT(store_->getNumKeys() - keys, 100);
}

// Loses the first beat.
class LossyStore final : public c10d::HashStore {
 public:
  c10::intrusive_ptr<c10d::Store> clone() override { return c10::intrusive_ptr<c10d::Store>::reclaim_copy(this); }
  using HashStore::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    if (key.find("/beat/") != std::string::npos && std::exchange(isToLose_, false)) {
      TORCH_CHECK_WITH(DistStoreError, false, "the store is away");
    }
    HashStore::set(key, value);
  }

 private:
  bool isToLose_ = true;
};

TEST_F(StorePulseTest, AFailureWhoseBeatWasLostIsAnnouncedWhenItIsReportedAgain) {
  const auto store = c10::make_intrusive<LossyStore>();
  const auto seen = reader_.beats(*store, kAlways);
  FailureBoard board(*store, 1);
  EXPECT_THROW(board.report("out of memory"), c10::DistStoreError);
  EXPECT_EQ(board.report("out of memory").message, "out of memory");
  EXPECT_NE(reader_.beats(*store, kAlways), seen);
}

}  // namespace
}  // namespace bagua
