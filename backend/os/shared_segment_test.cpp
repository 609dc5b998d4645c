// SPDX-License-Identifier: Apache-2.0
#include "backend/os/shared_segment.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <set>
#include <string>

#include "tests/support/child_processes.h"

namespace bagua {
namespace {

constexpr size_t kBytes = 12288;

SharedSegment newSegment() {
  std::string whyNot;
  auto segment = SharedSegment::create(kBytes, whyNot);
  TORCH_CHECK(segment.has_value(), whyNot);
  return std::move(*segment);
}

SharedSegment openAgain(const SharedSegment& segment) {
  std::string whyNot;
  auto opened = SharedSegment::open(segment.name(), kBytes, whyNot);
  TORCH_CHECK(opened.has_value(), whyNot);
  return std::move(*opened);
}

TEST(SharedSegment, LeavesNoNameBehind) {
  std::string name;
  {
    auto segment = newSegment();
    name = segment.name();
    openAgain(segment).removeName();  // not the creator: no effect
    segment.removeName();
    std::string whyNot;
    EXPECT_FALSE(SharedSegment::open(name, 1, whyNot).has_value());
    EXPECT_NE(whyNot.find("No such file"), std::string::npos) << whyNot;
  }
  EXPECT_LT(::shm_open(name.c_str(), O_RDWR, 0), 0);
}

// Passes the name of a segment that a killed process has made.
std::string nameOfAbandoned() {
  std::array<int, 2> ends{};
  TORCH_CHECK(::pipe(ends.data()) == 0);
  testing::inKilledProcess([&] {
    auto* const segment = new SharedSegment(newSegment());  // never destroyed
    const std::string& name = segment->name();
    TORCH_CHECK(::write(ends[1], name.data(), name.size()) == static_cast<ssize_t>(name.size()));
  });
  ::close(ends[1]);
  std::array<char, 128> name{};
  const ssize_t length = ::read(ends[0], name.data(), name.size());
  ::close(ends[0]);
  return {name.data(), static_cast<size_t>(length)};
}

bool hasName(const std::string& name) {
  const int file = ::shm_open(name.c_str(), O_RDWR, 0);
  if (file >= 0) ::close(file);
  return file >= 0;
}

TEST(SharedSegment, LosesItsNameWithThoseWhoHaveItWhenItsCreatorIsKilled) {
  const std::string name = nameOfAbandoned();
  ASSERT_TRUE(hasName(name));
  std::string whyNot;
  SharedSegment::open(name, kBytes, whyNot).reset();
  EXPECT_FALSE(hasName(name));
}

// A name without a lock may be one that is being made.
TEST(SharedSegment, KeepsItsNameWhileItIsYoungThoughNobodyHoldsIt) {
  const auto begun = std::chrono::steady_clock::now();
  const std::string name = nameOfAbandoned();
  newSegment();  // looks for abandoned names
  const bool isKept = hasName(name);
  // It is no longer young where the machine has been so busy meanwhile.
  EXPECT_TRUE(isKept || std::chrono::steady_clock::now() - begun > std::chrono::seconds(9));
  std::string whyNot;
  SharedSegment::open(name, kBytes, whyNot).reset();
}

TEST(SharedSegment, KeepsItsNameWhileItsCreatorLives) {
  const auto segment = newSegment();
  testing::inKilledProcess([&] {
    openAgain(segment).removeName();
    newSegment();  // looks for abandoned names
  });
  EXPECT_TRUE(hasName(segment.name()));
}

TEST(SharedSegment, TellsWhyThereIsNone) {
  std::string whyNot;
  EXPECT_FALSE(SharedSegment::create(size_t{1} << 50U, whyNot).has_value());
  EXPECT_NE(whyNot.find("posix_fallocate"), std::string::npos) << whyNot;
}

mode_t modeOf(const std::string& name) {
  struct stat status {};
  TORCH_CHECK(::stat(("/dev/shm" + name).c_str(), &status) == 0, name, " is not in /dev/shm");
  return status.st_mode & 07777U;
}

TEST(SharedSegment, IsItsOwnersAloneWhateverTheUmask) {
  const mode_t before = ::umask(0);
  const auto segment = newSegment();
  ::umask(before);
  EXPECT_EQ(modeOf(segment.name()), mode_t{S_IRUSR | S_IWUSR});
}

TEST(SharedSegment, HasANameThatNobodyCanGuess) {
  std::set<std::string> names;
  std::string digits;
  for (int i = 0; i < 64; ++i) {
    const std::string name = newSegment().name();
    names.insert(name);
    digits += name.substr(name.rfind('-') + 1);
  }
  EXPECT_EQ(names.size(), 64U);
  ASSERT_EQ(digits.size(), 64U * 32);
  // 128 digits of each of 16 kinds are to be expected; the deviation is 11.
  for (const char digit : std::string("0123456789abcdef")) {
    EXPECT_NEAR(static_cast<double>(std::count(digits.begin(), digits.end(), digit)), 128, 80) << digit;
  }
}

TEST(SharedSegment, OpensNothingButASegmentOfTheSizeThatWasAgreed) {
  const auto segment = newSegment();
  std::string whyNot;
  EXPECT_FALSE(SharedSegment::open(segment.name(), 2 * kBytes, whyNot).has_value());
  EXPECT_NE(whyNot.find("bytes instead of"), std::string::npos) << whyNot;
  for (const std::string name : {"", "/", "/bagua-../../etc/passwd", "/sem.something", "bagua-1", "/bagua-1-zz"}) {
    EXPECT_FALSE(SharedSegment::open(name, 4096, whyNot).has_value()) << name;
    EXPECT_EQ(whyNot, "the name that was told is none of ours") << name;
  }
}

TEST(SharedSegment, RefusesOneThatOtherUsersMayOpen) {
  const auto segment = newSegment();
  ASSERT_EQ(::chmod(("/dev/shm" + segment.name()).c_str(), S_IRUSR | S_IWUSR | S_IROTH), 0);
  std::string whyNot;
  EXPECT_FALSE(SharedSegment::open(segment.name(), kBytes, whyNot).has_value());
  EXPECT_EQ(whyNot, "it is open to other users");
}

// What a process of user "nobody" is told: 0 for success.
int errnoOfOpeningAsNobody(const std::string& name) {
  const pid_t child = ::fork();
  if (child == 0) {
    constexpr uid_t kNobody = 65534;
    if (::setgroups(0, nullptr) != 0 || ::setgid(kNobody) != 0 || ::setuid(kNobody) != 0) ::_exit(255);
    const int file = ::shm_open(name.c_str(), O_RDONLY, 0);
    ::_exit(file < 0 ? errno : 0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(SharedSegment, CannotBeOpenedByAnotherUser) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  const auto segment = newSegment();
  EXPECT_EQ(errnoOfOpeningAsNobody(segment.name()), EACCES);
}

TEST(SharedSegment, RefusesOneThatAnotherUserMade) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give a file away";
  const auto segment = newSegment();
  ASSERT_EQ(::chown(("/dev/shm" + segment.name()).c_str(), 65534, 65534), 0);
  std::string whyNot;
  EXPECT_FALSE(SharedSegment::open(segment.name(), kBytes, whyNot).has_value());
  EXPECT_EQ(whyNot, "it belongs to user 65534");
}

}  // namespace
}  // namespace bagua
