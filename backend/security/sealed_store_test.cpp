// SPDX-License-Identifier: Apache-2.0
#include "backend/security/sealed_store.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace bagua {
namespace {

using Bytes = std::vector<uint8_t>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

class SealedStoreTest : public ::testing::Test {
 protected:
  static StorePtr sealedWith(const std::string& secret, const StorePtr& store) {
    return c10::make_intrusive<SealedStore>(store, makeJobSecurity({.secret = secret}));
  }
  // Where a value lies below: what somebody sees who can reach the store.
  static std::string keyBelow(const std::string& key) {
    return "sealed/" + makeJobSecurity({.secret = "the secret of this job"})->fingerprint() + "/" + key;
  }
  std::string errorOf(const std::string& key) {
    try {
      ours_->get(key);
      return "";
    } catch (const c10::DistStoreError& error) {
      return error.what_without_backtrace();
    }
  }

  const c10::intrusive_ptr<c10d::HashStore> below_ = c10::make_intrusive<c10d::HashStore>();
  const StorePtr ours_ = sealedWith("the secret of this job", below_);
  const StorePtr theirs_ = sealedWith("the secret of another job", below_);
};

TEST_F(SealedStoreTest, RanksWithTheSecretReadWhatTheOthersWrite) {
  const StorePtr peer = c10::make_intrusive<c10d::PrefixStore>("group", sealedWith("the secret of this job", below_));
  const StorePtr group = c10::make_intrusive<c10d::PrefixStore>("group", ours_->clone());
  group->set("a", Bytes{1, 2});
  group->multiSet({"b", "c"}, {{3}, {}});
  peer->wait({"a", "b", "c"}, std::chrono::milliseconds(100));
  EXPECT_EQ(peer->get("a"), (Bytes{1, 2}));
  EXPECT_EQ(peer->multiGet({"c", "b"}), (std::vector<Bytes>{{}, {3}}));
  EXPECT_TRUE(peer->check({"a", "b"}));
  EXPECT_EQ(group->add("count", 2), 2);
  EXPECT_EQ(peer->add("count", 3), 5);
  EXPECT_TRUE(peer->deleteKey("a"));
  EXPECT_FALSE(group->check({"a"}));
}

TEST_F(SealedStoreTest, JobsWithDifferentSecretsDoNotMeet) {
  ours_->set("a", Bytes{1});
  EXPECT_FALSE(theirs_->check({"a"}));
  theirs_->set("a", Bytes{2});
  EXPECT_EQ(ours_->get("a"), Bytes{1});
  EXPECT_EQ(ours_->add("count", 1), 1);
  EXPECT_EQ(theirs_->add("count", 1), 1);
}

TEST_F(SealedStoreTest, WhatSomebodyElseHasWrittenIsAnErrorThatNamesTheKey) {
  ours_->set("host/0", Bytes{1});
  below_->set(keyBelow("host/0"), Bytes(40, 9));
  EXPECT_NE(errorOf("host/0").find("'host/0' was not written there by a rank with this job's secret"),
            std::string::npos)
      << errorOf("host/0");
  EXPECT_THROW(ours_->multiGet({"host/0"}), c10::DistStoreError);
}

TEST_F(SealedStoreTest, AValueThatWasMovedToAnotherKeyIsAnError) {
  ours_->set("group/1/host/0", Bytes{1});
  ours_->set("group/2/host/0", Bytes{2});
  below_->set(keyBelow("group/2/host/0"), below_->get(keyBelow("group/1/host/0")));
  EXPECT_EQ(errorOf("group/1/host/0"), "");
  EXPECT_NE(errorOf("group/2/host/0"), "");
}

TEST_F(SealedStoreTest, TheStoreBelowHoldsNothingThatCanBeRead) {
  const std::string text = "failure: out of memory on rank 3";
  ours_->set("failure", Bytes(text.begin(), text.end()));
  const auto held = below_->get_to_str(keyBelow("failure"));
  EXPECT_EQ(held.find("memory"), std::string::npos);
}

TEST_F(SealedStoreTest, TimeoutsAreThoseOfTheStoreBelow) {
  ours_->setTimeout(std::chrono::milliseconds(30));
  EXPECT_EQ(ours_->getTimeout(), std::chrono::milliseconds(30));
  EXPECT_ANY_THROW(ours_->get("never"));
}

}  // namespace
}  // namespace bagua
