// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/nccl_network.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <string>

namespace bagua {
namespace {

using std::chrono::microseconds;

constexpr const char* kNames[] = {"NCCL_NET",
                                  "NCCL_NET_PLUGIN",
                                  "NCCL_IB_DISABLE",
                                  "NCCL_CONF_FILE",
                                  "NCCL_SOCKET_NTHREADS",
                                  "NCCL_NSOCKS_PERTHREAD",
                                  "NCCL_MAX_NCHANNELS",
                                  "NCCL_MIN_CTAS",
                                  "NCCL_MAX_CTAS",
                                  "NCCL_MNNVL_ENABLE",
                                  "NCCL_NET_PLUGIN_REF_COUNT",
                                  "BAGUA_NCCL_NET",
                                  "BAGUA_JOB_SECRET",
                                  "BAGUA_JOB_SECRET_FILE"};

// Begins with nothing set but sockets, and leaves the environment as it was.
class NcclNetworkTest : public ::testing::Test {
 protected:
  NcclNetworkTest() {
    for (const char* name : kNames) {
      if (const char* value = std::getenv(name)) before_[name] = value;
      unsetenv(name);
    }
    set("NCCL_CONF_FILE", "/nowhere");
    set("NCCL_NET", "Socket");
  }
  ~NcclNetworkTest() override {
    for (const char* name : kNames) unsetenv(name);
    for (const auto& [name, value] : before_) set(name.c_str(), value);
  }
  static void set(const char* name, const std::string& value) { setenv(name, value.c_str(), 1); }
  static std::string valueOf(const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr ? "unset" : value;
  }
  static int socketsFor(microseconds roundTrip) {
    const NcclTerms terms = termsBetweenHosts(roundTrip);
    return terms.socketThreads * terms.socketsPerThread;
  }

  std::map<std::string, std::string> before_;
};

TEST_F(NcclNetworkTest, AShortRoundTripLeavesTheSocketsToNccl) {
  EXPECT_EQ(socketsFor(microseconds(0)), 0);
  EXPECT_EQ(socketsFor(microseconds(3000)), 0);
}

TEST_F(NcclNetworkTest, ALongRoundTripTakesAsManySocketsAsCarryTenGigabitsPerSecond) {
  EXPECT_EQ(socketsFor(microseconds(5000)), 2);
  EXPECT_EQ(socketsFor(microseconds(20000)), 6);
  // 15 would do; two threads have as many each.
  EXPECT_EQ(socketsFor(microseconds(50000)), 16);
}

TEST_F(NcclNetworkTest, NeverAsksForMoreSocketsThanNcclTakes) {
  for (int ms = 0; ms < 1000; ++ms) {
    const NcclTerms terms = termsBetweenHosts(std::chrono::milliseconds(ms));
    EXPECT_LE(terms.socketThreads * terms.socketsPerThread, 64) << ms;
    EXPECT_LE(terms.socketThreads, 16) << ms;
  }
  EXPECT_EQ(socketsFor(std::chrono::seconds(1)), 32);
}

TEST_F(NcclNetworkTest, FewCtasWaitForSockets) {
  EXPECT_EQ(termsBetweenHosts(microseconds(100)).maxCtas, 2);
  set("NCCL_NET", "");
  set("NCCL_IB_DISABLE", "1");
  EXPECT_EQ(termsBetweenHosts(microseconds(100)).maxCtas, 2);
}

TEST_F(NcclNetworkTest, OtherNetworksAreLeftToNccl) {
  const auto isLeft = [] {
    const NcclTerms terms = termsBetweenHosts(std::chrono::seconds(1));
    return !wantsRoundTrip() && terms.maxCtas == NCCL_CONFIG_UNDEF_INT && terms.socketThreads == 0;
  };
  set("NCCL_NET", "IB");
  EXPECT_TRUE(isLeft());
  set("NCCL_NET", "");
  set("NCCL_IB_DISABLE", "1");
  EXPECT_FALSE(isLeft());
  set("NCCL_NET_PLUGIN", "aws-ofi");
  EXPECT_TRUE(isLeft());
  set("NCCL_NET_PLUGIN", "none");
  EXPECT_FALSE(isLeft());
}

TEST_F(NcclNetworkTest, ChannelsThatTheUserHasChosenStay) {
  for (const char* name : {"NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS"}) {
    set(name, "8");
    EXPECT_EQ(termsBetweenHosts(microseconds(100)).maxCtas, NCCL_CONFIG_UNDEF_INT) << name;
    unsetenv(name);
  }
}

TEST_F(NcclNetworkTest, SocketsThatTheUserHasChosenStay) {
  set("NCCL_NSOCKS_PERTHREAD", "3");
  EXPECT_FALSE(wantsRoundTrip());
  useSockets({.maxCtas = 2, .socketThreads = 2, .socketsPerThread = 8});
  EXPECT_EQ(valueOf("NCCL_NSOCKS_PERTHREAD"), "3");
  EXPECT_EQ(valueOf("NCCL_SOCKET_NTHREADS"), "unset");
}

TEST_F(NcclNetworkTest, SocketsAreChosenOnce) {
  useSockets({});
  EXPECT_EQ(valueOf("NCCL_SOCKET_NTHREADS"), "unset");
  EXPECT_TRUE(wantsRoundTrip());
  useSockets({.maxCtas = 2, .socketThreads = 2, .socketsPerThread = 7});
  EXPECT_EQ(valueOf("NCCL_SOCKET_NTHREADS"), "2");
  EXPECT_EQ(valueOf("NCCL_NSOCKS_PERTHREAD"), "7");
  EXPECT_FALSE(wantsRoundTrip());
  useSockets({.maxCtas = 2, .socketThreads = 4, .socketsPerThread = 8});
  EXPECT_EQ(valueOf("NCCL_SOCKET_NTHREADS"), "2");
}

TEST_F(NcclNetworkTest, OurOwnNetworkIsLoadedUnlessTheUserHasChosenAnother) {
  EXPECT_FALSE(usesOwnNet());
  EXPECT_THROW(loadOwnNet(true), c10::ValueError) << "NCCL_NET=Socket";
  loadOwnNet(false);
  EXPECT_EQ(valueOf("NCCL_NET_PLUGIN"), "unset") << "on one host the choice stays";
  set("NCCL_NET", "Bagua");
  loadOwnNet(true);
  EXPECT_EQ(valueOf("NCCL_NET_PLUGIN"), ownNetPath());
  EXPECT_EQ(valueOf("NCCL_NET_PLUGIN_REF_COUNT"), "1");
  EXPECT_EQ(valueOf("NCCL_MNNVL_ENABLE"), "unset") << "there is no secret";
  loadOwnNet(true);
  set("NCCL_NET_PLUGIN", "aws-ofi");
  EXPECT_THROW(loadOwnNet(true), c10::ValueError);
  EXPECT_EQ(valueOf("NCCL_NET_PLUGIN"), "aws-ofi");
}

TEST_F(NcclNetworkTest, WhatNcclReadsFromAFileIsTheUsersChoice) {
  const std::string path = ::testing::TempDir() + "/nccl_network_test.conf";
  std::ofstream(path) << "# NCCL_MAX_CTAS=1\nNCCL_SOCKET_NTHREADS=4\n";
  set("NCCL_CONF_FILE", path);
  EXPECT_FALSE(wantsRoundTrip());
  EXPECT_EQ(ncclSetting("NCCL_SOCKET_NTHREADS"), "4");
  EXPECT_EQ(termsBetweenHosts(microseconds(100)).maxCtas, 2);
  set("NCCL_SOCKET_NTHREADS", "1");
  EXPECT_EQ(ncclSetting("NCCL_SOCKET_NTHREADS"), "1");
  std::remove(path.c_str());
}

// Settings of our own are read once in a process: each case has one, which tells what NCCL finds in its environment.
class NcclNetworkDeathTest : public NcclNetworkTest {
 protected:
  NcclNetworkDeathTest() {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    unsetenv("NCCL_NET");
  }
  [[noreturn]] static void tellWhatNcclFinds(const std::map<std::string, std::string>& settings) {
    for (const auto& [name, value] : settings) set(name.c_str(), value);
    std::string found = usesOwnNet() ? "our own;" : "NCCL's;";
    try {
      if (usesOwnNet()) loadOwnNet(true);
    } catch (const c10::Error& error) {
      found += error.what_without_backtrace();
    }
    found += goesOverSockets() ? " over sockets," : " over no sockets,";
    for (const char* name : {"NCCL_NET_PLUGIN", "NCCL_NET_PLUGIN_REF_COUNT", "NCCL_MNNVL_ENABLE", "NCCL_NET"}) {
      found += std::string(" ") + name + "=" + valueOf(name);
    }
    std::cerr << found << std::endl;
    _exit(0);
  }
  const ::testing::ExitedWithCode ends_{0};
  static constexpr const char* kSecret = "a secret of a test, worth nothing";
};

TEST_F(NcclNetworkDeathTest, TheSwitchHasNcclFindOurNetwork) {
  EXPECT_EXIT(tellWhatNcclFinds({{"BAGUA_NCCL_NET", "1"}}), ends_,
              "our own; over no sockets, NCCL_NET_PLUGIN=.*libnccl-net-bagua.so NCCL_NET_PLUGIN_REF_COUNT=1 "
              "NCCL_MNNVL_ENABLE=unset NCCL_NET=unset");
  EXPECT_EXIT(tellWhatNcclFinds({{"BAGUA_NCCL_NET", "1"}, {"NCCL_NET_PLUGIN_REF_COUNT", "3"}}), ends_,
              "NCCL_NET_PLUGIN_REF_COUNT=3");
  EXPECT_EXIT(tellWhatNcclFinds({{"BAGUA_NCCL_NET", "1"}, {"NCCL_NET", "Socket"}}), ends_,
              "is to send between hosts over bagua's transport .BAGUA_NCCL_NET=1., but NCCL_NET is 'Socket'.* "
              "NCCL_NET_PLUGIN=unset");
}

TEST_F(NcclNetworkDeathTest, AJobSecretHasNcclFindOurNetworkAndNoNvlinkBetweenHosts) {
  EXPECT_EXIT(tellWhatNcclFinds({{"BAGUA_JOB_SECRET", kSecret}}), ends_,
              "our own; .*NCCL_NET_PLUGIN=.*libnccl-net-bagua.so NCCL_NET_PLUGIN_REF_COUNT=1 NCCL_MNNVL_ENABLE=0");
  EXPECT_EXIT(tellWhatNcclFinds({{"BAGUA_JOB_SECRET", kSecret}, {"NCCL_MNNVL_ENABLE", "1"}}), ends_,
              "but NCCL_MNNVL_ENABLE is '1'.* NCCL_NET_PLUGIN=unset");
  EXPECT_EXIT(tellWhatNcclFinds({{"BAGUA_JOB_SECRET", kSecret}, {"BAGUA_NCCL_NET", "0"}}), ends_,
              "NCCL's; .* NCCL_NET_PLUGIN=unset");
  EXPECT_EXIT(tellWhatNcclFinds({}), ends_, "NCCL's; .* NCCL_NET_PLUGIN=unset .* NCCL_MNNVL_ENABLE=unset");
}

}  // namespace
}  // namespace bagua
