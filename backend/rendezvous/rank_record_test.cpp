// SPDX-License-Identifier: Apache-2.0
#include "backend/rendezvous/rank_record.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <future>
#include <optional>
#include <sstream>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tests/support/thrown_messages.h"

namespace bagua {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// `record` with another value in one line.
std::string with(const std::string& record, const std::string& name, const std::string& value) {
  const size_t begin = record.find(name + "=");
  return record.substr(0, begin) + name + "=" + value + record.substr(record.find('\n', begin));
}

std::string without(const std::string& record, const std::string& name) {
  const size_t begin = record.find(name + "=");
  return record.substr(0, begin) + record.substr(record.find('\n', begin) + 1);
}

std::string errorOf(const std::vector<std::string>& records) {
  try {
    membersOf(records);
    return "";
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
}

#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

TEST(RankRecord, RanksThatAgreeLearnWhoSharesAHost) {
  const std::string own = ownRecord();
  const auto topology = membersOf({own, with(own, "host", "elsewhere"), own}).topology;
  EXPECT_EQ(topology.hostCount(), 2);
  EXPECT_EQ(topology.ranksOf(0), (std::vector<int>{0, 2}));
}

// A record has a line for each field.
TEST(RankRecord, HostsWhoseNamesDifferBehindTheEndOfALineAreNotOne) {
  std::optional<std::string> before;
  if (const char* value = std::getenv("BAGUA_HOST_ID")) before = value;
  std::vector<std::string> records;
  for (const char* host : {"rack\n7", "rack\n8"}) {
    setenv("BAGUA_HOST_ID", host, 1);
    records.push_back(ownRecord());
  }
  if (before) {
    setenv("BAGUA_HOST_ID", before->c_str(), 1);
  } else {
    unsetenv("BAGUA_HOST_ID");
  }
  EXPECT_EQ(membersOf(records).topology.hostCount(), 2);
}

TEST(RankRecord, EveryGroupHasAnIdOfItsOwn) {
  const std::string own = ownRecord();
  const std::string other = ownRecord();
  EXPECT_EQ(membersOf({own, other}).id, membersOf({own, other}).id);
  EXPECT_NE(membersOf({own, other}).id, membersOf({own, ownRecord()}).id);
  EXPECT_EQ(membersOf({own, other}).addresses[0], membersOf({own, other}).addresses[1]);
}

// A group of one host needs no address.
TEST(RankRecord, RanksWithoutAnAddressAreNotTakenForThreadsOfOneProcess) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const std::string record = with(ownRecord(), "address", "none: no network");
  const auto members = membersHere(*store, 1, {record, record});
  EXPECT_TRUE(members.ownTransport == nullptr);
  EXPECT_EQ(members.addresses, std::vector<std::string>(2, "none: no network"));
}

TEST(RankRecord, ADifferenceNamesRanksValuesAndWhatToDo) {
  const std::string own = with(ownRecord(), "BAGUA_NCCL_CHANNELS", "1");
  const auto error = errorOf({own, own, with(own, "BAGUA_NCCL_CHANNELS", "2")});
  EXPECT_HAS(error, "rank 0 and rank 2");
  EXPECT_HAS(error, "BAGUA_NCCL_CHANNELS is '1' on rank 0 and '2' on rank 2");
  EXPECT_HAS(error, "set this environment variable to the same value on all ranks");
}

TEST(RankRecord, EveryFieldThatChangesBytesHasToAgree) {
  std::istringstream lines(ownRecord());
  int compared = 0;
  for (std::string line; std::getline(lines, line);) {
    const std::string name = line.substr(0, line.find('='));
    if (name == "host" || name == "address" || name == "nonce") continue;
    EXPECT_HAS(errorOf({ownRecord(), with(ownRecord(), name, "other")}), name + " is '");
    ++compared;
  }
  EXPECT_GE(compared, 6);
}

TEST(RankRecord, AnotherVersionIsUnderstoodWhateverItsFieldsAre) {
  const std::string own = ownRecord();
  const std::string newer = "something_new=7\n" + with(own, "bagua", "9.9.9");
  EXPECT_HAS(errorOf({own, newer}), "on rank 0 and '9.9.9' on rank 1: install the same version of bagua");
  // Another order, and a field that nobody else has, make no difference.
  EXPECT_EQ(errorOf({own, "something_new=7\n" + own}), "");
  // A version that told nothing but its host.
  EXPECT_HAS(errorOf({"f00/12", own}), "wire_format is not told (an older version?) on rank 0");
  EXPECT_HAS(errorOf({own, without(own, "torch")}), "torch is '");
  EXPECT_HAS(errorOf({own, std::string("\0\xff=\n=\n", 6)}), "wire_format");
}

TEST(RankRecord, ARankWithAWrongSettingIsNamedOnAll) {
  const std::string own = ownRecord();
  EXPECT_HAS(errorOf({own, own + "refusal=the variable is wrong\n"}), "rank 1 cannot take part in a group");
  EXPECT_HAS(errorOf({own, own + "refusal=the variable is wrong\n"}), "the variable is wrong");
}

// The process that serves it has ended.
class LostStore final : public c10d::HashStore {
 public:
  using HashStore::wait;
  void wait(const std::vector<std::string>&, const milliseconds&) override {
    C10_THROW_ERROR(DistNetworkError, "connection reset");
  }
  bool check(const std::vector<std::string>&) override { C10_THROW_ERROR(DistNetworkError, "connection reset"); }
};

TEST(RankRecord, WhoLosesTheStoreSaysWhatForAndWhatTheStoreSays) {
  const auto store = c10::make_intrusive<LostStore>();
  const auto message =
      testing::messageThrownBy<c10::DistBackendError>([&] { exchangeRecords(*store, 0, 2, seconds(30)); });
  EXPECT_HAS(message, "rank 0 of 2 could not make the process group: connection reset");
  EXPECT_HAS(message, "the store, which does not answer");
}

TEST(RankRecord, AllRanksOfAGroupRaiseTheSameAndNoneWaitsForLong) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const std::string other = with(ownRecord(), "torch", "1.0");
  // This rank is of another version: it never says that it has read.
  store->set("host/2", std::vector<uint8_t>(other.begin(), other.end()));
  const auto meet = [&](int rank) {
    try {
      exchangeRecords(*store, rank, 3, seconds(30));
      return std::string();
    } catch (const c10::ValueError& error) {
      return std::string(error.what_without_backtrace());
    }
  };
  const auto begin = std::chrono::steady_clock::now();
  auto first = std::async(std::launch::async, meet, 0);
  auto second = std::async(std::launch::async, meet, 1);
  const std::string error = first.get();
  EXPECT_HAS(error, "torch is '");
  EXPECT_EQ(error, second.get());
  EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(10));
}

}  // namespace
}  // namespace bagua
