// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/compressed/finite_groups.h"

#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "algorithms/algorithm_interfaces.h"
#include "algorithms/registry.h"
#include "tests/support/thread_ranks.h"

namespace bagua::compressed {
namespace {

TEST(FiniteGroups, OneValueOfEachGroupTells) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    for (const double value : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(),
                               -std::numeric_limits<double>::infinity()}) {
      at::Tensor values = at::full({100}, 3e4, dtype);
      EXPECT_TRUE(areGroupsFinite(values, {0, 100}, 32)) << dtype;
      // The last group has four elements.
      for (const int64_t group : {0, 1, 3}) {
        const at::Tensor ofGroup = values.narrow(0, 32 * group, group == 3 ? 4 : 32);
        ofGroup.fill_(value);
        EXPECT_FALSE(areGroupsFinite(values, {0, 100}, 32)) << dtype << " " << group;
        EXPECT_EQ(areGroupsFinite(values, {32, 96}, 32), group != 1) << dtype << " " << group;
        ofGroup.fill_(-3e4);
      }
      values[7] = value;
      EXPECT_FALSE(areGroupsFinite(values, {0, 100}, 1)) << dtype;
    }
  }
}

// Calls of an ATen operator on this thread.
class Calls {
 public:
  explicit Calls(const std::string& name) {
    watched() = name;
    count() = 0;
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
          if (watched() == function.name()) ++count();
          return nullptr;
        }));
  }
  ~Calls() { at::removeCallback(handle_); }
  Calls(const Calls&) = delete;
  Calls& operator=(const Calls&) = delete;
  [[nodiscard]] static int& count() {
    thread_local int calls = 0;
    return calls;
  }

 private:
  [[nodiscard]] static std::string& watched() {
    thread_local std::string name;
    return name;
  }
  at::CallbackHandle handle_ = 0;
};

// With one rank per host the decoder has seen all values; else other ranks of the host have decoded some of them.
TEST(FiniteGroups, ResultsAreNotReadOnceMoreWhereThisRankHasDecodedThemAll) {
  const auto& info = AlgorithmRegistry::find("quantized_allreduce");
  for (const bool isAlone : {true, false}) {
    testing::runRanks(
        isAlone ? 2 : 4,
        [&](Communicator& communicator) {
          const auto algorithm = info.create(Options(info.name, info.options, {{"exact", std::string("1d")}}));
          const at::Tensor flat = at::randn({64 * 50 + 70});
          Bucket bucket{.flat = flat,
                        .entries = {{1, flat.narrow(0, 0, 3200).view({64, 50})}, {0, flat.narrow(0, 3200, 70)}}};
          const Calls calls("aten::aminmax");
          algorithm->reduce(bucket, communicator);
          EXPECT_EQ(Calls::count(), isAlone ? 0 : 1);
        },
        isAlone ? std::vector<std::string>{"a", "b"} : std::vector<std::string>{"a", "a", "b", "b"});
  }
}

}  // namespace
}  // namespace bagua::compressed
