// SPDX-License-Identifier: Apache-2.0
#include "backend/os/local_address.h"

#include <gtest/gtest.h>

namespace bagua::net {
namespace {

TEST(Interfaces, AreNamedOnceEachThoughTheNameOfOneIsAPartOfAnothers) {
  EXPECT_EQ(namesOf({{"veth0", {}}, {"eth0", {}}, {"veth0", {}}, {"lo", {}}}), "eth0, lo, veth0");
  EXPECT_EQ(namesOf({}), "");
}

}  // namespace
}  // namespace bagua::net
