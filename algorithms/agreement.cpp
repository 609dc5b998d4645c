// SPDX-License-Identifier: Apache-2.0
#include "algorithms/agreement.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <optional>

namespace bagua {
namespace {

constexpr const char* kCheckAgreement = "bagua:check_agreement";
// What travels: a byte that tells whether the rank refuses, two hashes, and the beginning of the algorithm's text.
constexpr int64_t kHashBytes = sizeof(int64_t);
constexpr int64_t kTextBytes = 240;
constexpr int64_t kMessageBytes = 1 + 2 * kHashBytes + kTextBytes;

// FNV-1a: the same on every rank, machine and build.
int64_t stableHash(const std::string& text) {
  uint64_t hash = 14695981039346656037ULL;
  for (const unsigned char byte : text) hash = (hash ^ byte) * 1099511628211ULL;
  return static_cast<int64_t>(hash);
}

at::Tensor messageOf(const Facts& facts) {
  at::Tensor message = at::zeros({kMessageBytes}, at::kByte);
  auto* const bytes = message.data_ptr<uint8_t>();
  bytes[0] = facts.algorithm.empty() ? 1 : 0;
  const std::array<int64_t, 2> hashes{stableHash(facts.algorithm), stableHash(facts.parameters)};
  std::memcpy(bytes + 1, hashes.data(), sizeof(hashes));
  // NOLINTNEXTLINE(bugprone-not-null-terminated-result): the message is all zeros, and at least one of them stays
  std::memcpy(bytes + 1 + sizeof(hashes), facts.algorithm.data(),
              std::min<size_t>(facts.algorithm.size(), kTextBytes - 1));
  return message;
}

class Found {
 public:
  explicit Found(const at::Tensor& messages) : messages_(messages.cpu()) {}

  [[nodiscard]] bool isRefusal(int rank) const { return of(rank)[0] != 0; }
  [[nodiscard]] bool isSame(int rank, int hash) const {
    const int64_t offset = 1 + hash * kHashBytes;
    return std::memcmp(of(rank) + offset, of(0) + offset, kHashBytes) == 0;
  }
  // A peer's: it need not end with a zero.
  [[nodiscard]] std::string text(int rank) const {
    const auto* const begin = reinterpret_cast<const char*>(of(rank) + 1 + 2 * kHashBytes);
    return {begin, ::strnlen(begin, kTextBytes)};
  }

 private:
  [[nodiscard]] const uint8_t* of(int rank) const { return messages_.data_ptr<uint8_t>() + rank * kMessageBytes; }
  const at::Tensor messages_;
};

void check(const Found& found, const Facts& own, const GroupIdentity& group) {
  for (int rank = 0; rank < group.size; ++rank) {
    TORCH_CHECK_VALUE(!found.isRefusal(rank), "bagua: rank ", rank,
                      " could not register its algorithm (its own error says why); rank ", group.rank, " has ",
                      own.algorithm);
  }
  for (int rank = 0; rank < group.size; ++rank) {
    TORCH_CHECK_VALUE(found.isSame(rank, 0), "bagua: rank ", rank, " registered another algorithm or other options ",
                      "than rank 0: ", found.text(rank), " against ", found.text(0));
    TORCH_CHECK_VALUE(found.isSame(rank, 1), "bagua: rank ", rank,
                      " registered its algorithm on a model of other parameters than rank 0; rank ", group.rank,
                      " has ", own.parameters);
  }
}

}  // namespace

HostTopology agreeOn(const Facts& own, ExecutorProvider& executors, at::Device device) {
  const auto& group = executors.identity();
  const at::Tensor mine = messageOf(own).to(device);
  at::Tensor all = at::empty({group.size, kMessageBytes}, mine.options());
  const Operation operation{.type = c10d::OpType::ALLGATHER,
                            .name = kCheckAgreement,
                            .dtype = at::kByte,
                            .numel = kMessageBytes,
                            .timeout = executors.timeout()};
  // Shared: a program that is abandoned may outlive us.
  const auto topology = std::make_shared<std::optional<HostTopology>>();
  executors.executorFor(device)
      .submit(operation, {all},
              [mine, all, topology](Communicator& communicator) mutable {
                communicator.allGather(all, mine);
                *topology = communicator.topology();
              })
      ->wait(kNoTimeout);
  // A rank that refuses says itself what is wrong.
  if (!own.algorithm.empty()) check(Found(all), own, group);
  return topology->value();
}

}  // namespace bagua
