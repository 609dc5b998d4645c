// SPDX-License-Identifier: Apache-2.0
#include "backend/rendezvous/member_handle.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <set>

namespace bagua {
namespace {

TEST(MemberHandle, IsReadAsItWasWritten) {
  for (const std::string address : {"10.0.0.1", "fd00::1", "::1"}) {
    const MemberHandle written{.rank = 3, .token = "0123456789abcdef", .address = address, .port = 4711};
    const MemberHandle read = MemberHandle::parse(written.toString());
    EXPECT_EQ(read.rank, 3);
    EXPECT_EQ(read.token, "0123456789abcdef");
    EXPECT_EQ(read.address, address);
    EXPECT_EQ(read.port, 4711);
  }
}

TEST(MemberHandle, TextsAreInTheOrderOfRanks) {
  std::set<std::string> sorted;
  for (const int rank : {10, 9, 100, 0}) {
    sorted.insert(MemberHandle{.rank = rank, .token = "0123456789abcdef", .address = "::1", .port = 1}.toString());
  }
  std::vector<int> ranks;
  for (const auto& text : sorted) ranks.push_back(MemberHandle::parse(text).rank);
  EXPECT_EQ(ranks, (std::vector<int>{0, 9, 10, 100}));
}

TEST(MemberHandle, RefusesWhatIsNone) {
  for (const std::string text :
       {"", "bagua", "gloo:0:-1:0:10.0.0.1:29500",
        "bagua:000003:0123456789abcdef:4711:", "bagua:x:0123456789abcdef:1:a",
        "bagua:000003:0123456789abcdef:0:10.0.0.1", "bagua:000003:0123456789abcdef:65536:10.0.0.1",
        "bagua:-00001:0123456789abcdef:4711:10.0.0.1", "bagua:000003:short:4711:10.0.0.1",
        "bagua:3rd:0123456789abcdef:4711:10.0.0.1", "bagua:000003:0123456789abcdef:4711x:10.0.0.1"}) {
    EXPECT_THROW(MemberHandle::parse(text), c10::ValueError) << text;
  }
}

TEST(MemberHandle, MembersOfOneProcessDifferAndAreMetInOneStore) {
  const auto first = MemberHandle::draw(0);
  const auto second = MemberHandle::draw(0);
  EXPECT_NE(first.token, second.token);
  EXPECT_EQ(first.port, second.port);
  first.connect(std::chrono::seconds(10))->set("key", "value");
  EXPECT_EQ(second.connect(std::chrono::seconds(10))->get_to_str("key"), "value");
}

TEST(MemberHandle, NamesAMemberThatDoesNotAnswer) {
  MemberHandle gone = MemberHandle::draw(5);
  gone.port = 1;
  try {
    static_cast<void>(gone.connect(std::chrono::milliseconds(200)));
    FAIL() << "nobody listens there";
  } catch (const c10::DistBackendError& error) {
    EXPECT_NE(std::string(error.what()).find("bagua:000005:" + gone.token), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace bagua
