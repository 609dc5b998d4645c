// SPDX-License-Identifier: Apache-2.0
// The loops of every instruction set that this machine can run, bit for bit against those that any machine can.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "kernels/loops/low_rank/low_rank_loops.h"

namespace bagua::low_rank {
namespace {

template <class T>
const MatrixLoops<T>& loopsOfType(const Loops& loops) {
  if constexpr (std::is_same_v<T, float>) {
    return loops.ofFloat;
  } else {
    return loops.ofDouble;
  }
}

template <class T>
struct Results {
  std::vector<T> p, q, values;
  std::vector<float> residual;

  bool operator==(const Results& other) const {
    const auto same = [](const auto& one, const auto& two) {
      return std::memcmp(one.data(), two.data(), one.size() * sizeof(one[0])) == 0;
    };
    return same(p, other.p) && same(q, other.q) && same(values, other.values) && same(residual, other.residual);
  }
};

// With a matrix at an odd place in memory.
template <class T>
Results<T> run(const MatrixLoops<T>& loops, int64_t rows, int64_t columns, int64_t rank, bool hasResidual) {
  std::mt19937 generator(static_cast<unsigned>(rows + 31 * columns + rank));
  std::normal_distribution<float> normal;
  const auto draw = [&](int64_t count) {
    std::vector<T> values(count);
    for (auto& value : values) value = static_cast<T>(normal(generator)) * static_cast<T>(1.0000001);
    return values;
  };
  Results<T> results{.p = draw(rank * rows),
                     .q = draw(rank * columns),
                     .values = draw(rows * columns + 1),
                     .residual = std::vector<float>(rows * columns + 1)};
  for (auto& value : results.residual) value = normal(generator);
  const Arguments<T> matrix{.values = results.values.data() + 1,
                            .residual = hasResidual ? results.residual.data() + 1 : nullptr,
                            .rows = rows,
                            .columns = columns,
                            .rank = rank};
  const std::vector<T> q = results.q;
  loops.multiply(matrix, q.data(), results.p.data());
  loops.multiplyTransposed(matrix, results.p.data(), results.q.data());
  loops.replace(matrix, results.p.data(), q.data(), true);
  return results;
}

template <class T>
void compareAll() {
  const Loops& scalar = *availableLoops().front();
  for (const Loops* const loops : availableLoops()) {
    for (const int64_t rows : {1, 7, 33}) {
      for (const int64_t columns : {1, 15, 16, 131}) {
        for (const int64_t rank : {1, 3, 4, 7}) {
          for (const bool hasResidual : {false, true}) {
            EXPECT_TRUE(run(loopsOfType<T>(*loops), rows, columns, rank, hasResidual) ==
                        run(loopsOfType<T>(scalar), rows, columns, rank, hasResidual))
                << loops->name << " " << rows << "x" << columns << " rank " << rank << " " << hasResidual;
          }
        }
      }
    }
  }
}

TEST(LowRankLoops, FloatHasTheSameBitsOnEveryInstructionSet) { compareAll<float>(); }
TEST(LowRankLoops, DoubleHasTheSameBitsOnEveryInstructionSet) { compareAll<double>(); }

}  // namespace
}  // namespace bagua::low_rank
