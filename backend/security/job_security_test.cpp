// SPDX-License-Identifier: Apache-2.0
#include "backend/security/job_security.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

namespace bagua {
namespace {

using Bytes = std::vector<uint8_t>;

const std::string kSecret = "correct horse battery staple";

std::shared_ptr<const JobSecurity> securityOf(const std::string& secret) { return makeJobSecurity({.secret = secret}); }

TEST(JobSecurity, TheFingerprintTellsSecretsApartAndIsTheSameInAllProcesses) {
  EXPECT_EQ(securityOf(kSecret)->fingerprint(), securityOf(kSecret)->fingerprint());
  EXPECT_NE(securityOf(kSecret)->fingerprint(), securityOf(kSecret + "!")->fingerprint());
  // HMAC-SHA256(HMAC-SHA256("bagua job secret 1", secret), "fingerprint" 01), computed with Python's hmac.
  EXPECT_EQ(securityOf(kSecret)->fingerprint(), "06d98b2025758a6e");
}

TEST(JobSecurity, WhatIsSealedIsOpenedUnderItsNameWithItsSecretOnly) {
  const auto security = securityOf(kSecret);
  for (const size_t size : {0, 1, 16, 100'000}) {
    const Bytes value(size, 7);
    const Bytes sealed = security->seal("host/0", value);
    EXPECT_EQ(securityOf(kSecret)->open("host/0", sealed), value);
    EXPECT_EQ(security->open("host/1", sealed), std::nullopt);
    EXPECT_EQ(security->open("", sealed), std::nullopt);
    EXPECT_EQ(securityOf(kSecret + "!")->open("host/0", sealed), std::nullopt);
  }
}

TEST(JobSecurity, NoChangedOrCutOffByteIsOverlooked) {
  const auto security = securityOf(kSecret);
  const Bytes sealed = security->seal("name", {1, 2, 3, 4, 5});
  for (size_t position = 0; position < sealed.size(); ++position) {
    Bytes changed = sealed;
    changed[position] ^= 1U;
    EXPECT_EQ(security->open("name", changed), std::nullopt) << position;
    EXPECT_EQ(security->open("name", Bytes(sealed.begin(), sealed.begin() + static_cast<ptrdiff_t>(position))),
              std::nullopt);
  }
  EXPECT_EQ(security->open("name", {1, 2, 3, 4, 5}), std::nullopt);
}

TEST(JobSecurity, ASealedValueShowsNothingAndIsNeverTheSameTwice) {
  const auto security = securityOf(kSecret);
  const std::string text = "a text that is easily recognised";
  const Bytes value(text.begin(), text.end());
  const Bytes sealed = security->seal("name", value);
  EXPECT_EQ(std::search(sealed.begin(), sealed.end(), value.begin(), value.begin() + 8), sealed.end());
  EXPECT_NE(sealed, security->seal("name", value));
}

TEST(JobSecurity, CertificatesThatCannotBeUsedAreRefusedByTheNameOfTheirVariable) {
  const config::TlsFiles files{.certificate = "/nowhere/a.pem", .key = "/nowhere/b.pem", .authority = "/nowhere/c.pem"};
  try {
    makeJobSecurity({.secret = kSecret, .certificates = files});
    FAIL() << "was accepted";
  } catch (const c10::ValueError& error) {
    const std::string text = error.what_without_backtrace();
    EXPECT_NE(text.find("BAGUA_TLS_CERTIFICATE"), std::string::npos) << text;
    EXPECT_NE(text.find("/nowhere/a.pem"), std::string::npos) << text;
    EXPECT_EQ(text.find(kSecret), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace bagua
