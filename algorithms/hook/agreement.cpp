// SPDX-License-Identifier: Apache-2.0
#include "algorithms/hook/agreement.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "backend/operation/hash.h"

namespace bagua {
namespace {

constexpr const char* kCheckAgreement = "bagua:check_agreement";
// What travels: a byte that tells whether the rank refuses, two hashes, and the beginning of the text.
constexpr int64_t kHashBytes = sizeof(uint64_t);
constexpr int64_t kTextBytes = 240;
constexpr int64_t kMessageBytes = 1 + 2 * kHashBytes + kTextBytes;

at::Tensor messageOf(const Registration& own) {
  at::Tensor message = at::zeros({kMessageBytes}, at::kByte);
  auto* const bytes = message.data_ptr<uint8_t>();
  bytes[0] = own.text.empty() ? 1 : 0;
  const std::array<uint64_t, 2> hashes{hashOf(own.text), hashOf(own.detail)};
  std::memcpy(bytes + 1, hashes.data(), sizeof(hashes));
  // NOLINTNEXTLINE(bugprone-not-null-terminated-result): the message is all zeros, and at least one of them stays
  std::memcpy(bytes + 1 + sizeof(hashes), own.text.data(), std::min<size_t>(own.text.size(), kTextBytes - 1));
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

void check(const Found& found, const Registration& own, const AgreementWords& words, const GroupIdentity& group) {
  for (int rank = 0; rank < group.size; ++rank) {
    TORCH_CHECK_VALUE(!found.isRefusal(rank), "bagua: rank ", rank, " ", words.refuses,
                      " (its own error says why); rank ", group.rank, " has ", own.text);
  }
  for (int rank = 0; rank < group.size; ++rank) {
    TORCH_CHECK_VALUE(found.isSame(rank, 0), "bagua: rank ", rank, " ", words.otherText, ": ", found.text(rank),
                      " against ", found.text(0));
    TORCH_CHECK_VALUE(found.isSame(rank, 1), "bagua: rank ", rank, " ", words.otherDetail, "; rank ", group.rank,
                      " has ", own.detail);
  }
}

}  // namespace

void agreeOn(const Registration& own, const AgreementWords& words, ExecutorProvider& executors, at::Device device) {
  const GroupIdentity group = executors.identity();
  const at::Tensor mine = messageOf(own).to(device);
  at::Tensor all = at::empty({group.size, kMessageBytes}, mine.options());
  const Operation operation{.type = c10d::OpType::ALLGATHER,
                            .name = kCheckAgreement,
                            .dtype = at::kByte,
                            .numel = kMessageBytes,
                            .timeout = executors.timeout()};
  executors.executorFor(device)
      ->submit(operation, {all}, [mine, all](Communicator& communicator) mutable { communicator.allGather(all, mine); })
      ->wait(kNoTimeout);
  // A rank that refuses says itself what is wrong.
  if (!own.text.empty()) check(Found(all), own, words, group);
}

}  // namespace bagua
