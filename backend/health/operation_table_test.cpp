// SPDX-License-Identifier: Apache-2.0
#include "backend/health/operation_table.h"

#include <gtest/gtest.h>

namespace bagua {
namespace {

RunningOperation program(uint64_t sequence) {
  RunningOperation operation;
  operation.program = fingerprintOf(Operation{.name = "bagua:all_reduce", .sequence = sequence});
  return operation;
}

// Others would wait for it in vain, and name this rank as missing.
TEST(OperationTable, OfOperationsThatOvertakeEachOtherTheLatestIsTheLastCompleted) {
  OperationTable table;
  const size_t row = table.add("cpu", nullptr);
  const auto first = table.begin(row, program(4));
  const auto second = table.begin(row, program(5));
  EXPECT_TRUE(table.end(row, second, true));
  EXPECT_TRUE(table.end(row, first, true));
  EXPECT_FALSE(table.end(row, first, true)) << "it has ended before";
  EXPECT_EQ(table.activities().at(0).completed.sequence, 5);
}

TEST(OperationTable, WhatHasFailedIsNotCompleted) {
  OperationTable table;
  const size_t row = table.add("cpu", nullptr);
  table.end(row, table.begin(row, program(4)), false);
  EXPECT_FALSE(table.activities().at(0).completed.exists);
  EXPECT_TRUE(table.isIdle());
}

}  // namespace
}  // namespace bagua
