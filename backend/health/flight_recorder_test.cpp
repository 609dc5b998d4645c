// SPDX-License-Identifier: Apache-2.0
#include "backend/health/flight_recorder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

namespace bagua {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

struct Dump {
  std::set<std::string> groups;
  // The group of each operation, from the first to the last.
  std::vector<std::string> entries;
  c10::IValue all;
};

Dump dumpOf(const FlightRecorder& recorder) {
  const std::string bytes = recorder.dump();
  Dump dump;
  dump.all = torch::jit::unpickle(bytes.data(), bytes.size());
  const auto all = dump.all.toGenericDict();
  for (const auto& group : all.at("pg_config").toGenericDict()) dump.groups.insert(group.key().toStringRef());
  for (const c10::IValue& entry : all.at("entries").toListRef()) {
    dump.entries.push_back(entry.toGenericDict().at("process_group").toTupleRef().elements()[0].toStringRef());
  }
  return dump;
}

std::shared_ptr<FlightRecorder::Group> add(FlightRecorder& recorder, const std::string& name,
                                           std::vector<uint64_t> ranks = {0}) {
  return recorder.addGroup({.name = name, .rank = 0, .globalRanks = std::move(ranks)});
}

uint64_t start(FlightRecorder& recorder, const std::shared_ptr<FlightRecorder::Group>& group) {
  const Operation operation{.type = c10d::OpType::ALLREDUCE, .name = "bagua:all_reduce", .dtype = at::kFloat};
  return recorder.begin(group, operation, fingerprintOf(operation));
}

void run(FlightRecorder& recorder, const std::shared_ptr<FlightRecorder::Group>& group) {
  recorder.end(start(recorder, group), true);
}

TEST(FlightRecorder, KeepsAGroupWhileItLivesAlsoWithoutOperations) {
  FlightRecorder recorder(2);
  const auto busy = add(recorder, "busy");
  const auto idle = add(recorder, "idle");
  for (int operation = 0; operation < 5; ++operation) run(recorder, busy);
  const auto dump = dumpOf(recorder);
  EXPECT_THAT(dump.groups, ElementsAre("busy", "idle"));
  EXPECT_THAT(dump.entries, ElementsAre("busy", "busy"));
}

TEST(FlightRecorder, AGroupThatHasEndedGoesWithTheLastOfItsOperations) {
  FlightRecorder recorder(2);
  auto first = add(recorder, "first");
  auto second = add(recorder, "second");
  run(recorder, first);
  run(recorder, first);
  first.reset();
  run(recorder, second);
  auto dump = dumpOf(recorder);
  EXPECT_THAT(dump.groups, ElementsAre("first", "second"));
  EXPECT_THAT(dump.entries, ElementsAre("first", "second"));
  run(recorder, second);
  dump = dumpOf(recorder);
  EXPECT_THAT(dump.groups, ElementsAre("second"));
  EXPECT_THAT(dump.entries, ElementsAre("second", "second"));
  second.reset();
  EXPECT_THAT(dumpOf(recorder).groups, ElementsAre("second"));
}

TEST(FlightRecorder, AGroupThatNeverRanAnythingGoesWhenItEnds) {
  for (const size_t capacity : {0, 2}) {
    FlightRecorder recorder(capacity);
    for (int round = 0; round < 3; ++round) {
      const auto group = add(recorder, "group " + std::to_string(round));
      if (capacity == 0) run(recorder, group);
    }
    EXPECT_THAT(dumpOf(recorder).groups, IsEmpty());
  }
}

TEST(FlightRecorder, TheEndOfAnOperationThatIsNoLongerKnownCompletesNoOther) {
  FlightRecorder recorder(2);
  const auto group = add(recorder, "group");
  const uint64_t forgotten = start(recorder, group);
  const uint64_t known = start(recorder, group);
  start(recorder, group);
  recorder.end(forgotten, true);
  recorder.end(known, true);
  std::vector<std::string> states;
  const auto dump = dumpOf(recorder);
  for (const c10::IValue& entry : dump.all.toGenericDict().at("entries").toListRef()) {
    states.push_back(entry.toGenericDict().at("state").toStringRef());
  }
  EXPECT_THAT(states, ElementsAre("completed", "started"));
}

TEST(FlightRecorder, ANumberIsGivenToOneGroupOnly) {
  FlightRecorder recorder(2);
  const uint64_t first = add(recorder, "first")->id;
  EXPECT_NE(add(recorder, "second")->id, first);
}

TEST(FlightRecorder, OfGroupsWithOneNameTellsTheRanksOfTheLatest) {
  FlightRecorder recorder(2);
  run(recorder, add(recorder, "0", {0, 1}));
  const auto latest = add(recorder, "0", {0, 1, 2});
  const auto config = dumpOf(recorder).all.toGenericDict().at("pg_config").toGenericDict().at("0").toGenericDict();
  EXPECT_EQ(config.at("ranks").toStringRef(), "[0, 1, 2]");
}

}  // namespace
}  // namespace bagua
