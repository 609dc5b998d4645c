// SPDX-License-Identifier: Apache-2.0
// What ranks of other hosts say ahead of an exchange: what they are about to do, and how much they send and expect. Any
// bytes. The exchange is refused with an exception, or the data that follow fill the tensors and nothing else.
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "backend/cpu/collectives/cpu_communicator.h"
#include "backend/operation/peer_errors.h"
#include "tests/fuzz/fuzzed_bytes.h"

namespace bagua {
namespace {

using fuzz::FuzzedBytes;
using Splits = Communicator::Splits;

// Whose peers send what the fuzzer makes up.
class MadeUpWire final : public Wire {
 public:
  MadeUpWire(int rank, int size, FuzzedBytes& input) : Wire(rank, size), input_(input) {}

  void exchangeInPieces(const Exchanges& exchanges, const Pipeline& pipeline, const Exchanges& forwarded,
                        Deadline /*deadline*/) override {
    int64_t longest = 0;
    for (const auto* const list : {&exchanges, &forwarded}) {
      for (const auto& exchange : *list) {
        TORCH_INTERNAL_ASSERT(0 <= exchange.peer && exchange.peer < size(), "no rank ", exchange.peer);
        // What is filled again and again is larger than anything here.
        TORCH_INTERNAL_ASSERT(exchange.incomingBytes() == exchange.received.numel());
        longest = std::max({longest, exchange.sent.numel(), exchange.received.numel()});
      }
    }
    if (pipeline.beforeSending) pipeline.beforeSending(0, longest);
    for (const auto& exchange : exchanges) receive(exchange);
    if (pipeline.afterReceiving) pipeline.afterReceiving(0, longest);
    for (const auto& exchange : forwarded) receive(exchange);
  }
  void abort() override {}

 private:
  // What this rank says itself, mostly, but for some bytes; or anything.
  void receive(const Exchange& exchange) {
    const int64_t count = exchange.received.numel();
    if (count == 0) return;
    auto* const bytes = exchange.received.mutable_data_ptr<uint8_t>();
    if (exchange.sent.numel() != count || input_.take<uint8_t>() % 8 == 0) return input_.fill(bytes, count);
    std::memcpy(bytes, exchange.sent.const_data_ptr<uint8_t>(), count);
    for (int64_t changes = input_.take<uint8_t>() % 8; changes > 4; --changes) {
      const int64_t position = input_.from(0, count - 1);
      bytes[position] = input_.take<uint8_t>();
    }
  }

  FuzzedBytes& input_;
};

Operation madeUpOperation(FuzzedBytes& input, int ranks) {
  static constexpr std::array kNames = {"bagua:all_to_all", "", "bagua:all_gather_into_tensor_coalesced_and_more"};
  Operation operation{.type = c10d::OpType::ALLTOALL_BASE,
                      .name = kNames.at(input.take<uint8_t>() % kNames.size()),
                      .dtype = at::kFloat,
                      .numel = input.from(0, 64)};
  operation.sequence = input.take<uint8_t>();
  operation.peer = static_cast<int>(input.from(-1, ranks - 1));
  operation.reduceOp = static_cast<int>(input.from(-1, 9));
  if (input.take<uint8_t>() % 4 != 0) operation.commonNumel = Operation::kAnyNumel;
  if (input.coin()) operation.configuration = std::make_shared<const std::string>(input.text(64));
  return operation;
}

Splits splitsOf(FuzzedBytes& input, int ranks) {
  Splits splits;
  for (int rank = 0; rank < ranks; ++rank) splits.push_back(input.from(0, 3));
  return splits;
}

int64_t sumOf(const Splits& splits) {
  int64_t sum = 0;
  for (const int64_t part : splits) sum += part;
  return sum;
}

at::Tensor zerosOf(int64_t numel) { return at::zeros({numel}, at::kFloat); }

void exchange(FuzzedBytes& input, Communicator& communicator) {
  const int ranks = communicator.size();
  at::Tensor tensor = zerosOf(input.from(0, 40));
  switch (input.take<uint8_t>() % 6) {
    case 0:
      return communicator.allReduce(tensor, c10d::ReduceOp::SUM);
    case 1:
      return communicator.broadcast(tensor, static_cast<int>(input.from(0, ranks - 1)));
    case 2: {
      at::Tensor all = zerosOf(ranks * tensor.numel());
      return communicator.allGather(all, tensor);
    }
    case 3: {
      // As many to each as from it: what a peer that says the same agrees with.
      const Splits splits = splitsOf(input, ranks);
      at::Tensor received = zerosOf(sumOf(splits));
      return communicator.allToAll(received, zerosOf(sumOf(splits)), splits, splits);
    }
    case 4:
      return communicator.barrier();
    default: {
      const Splits from = splitsOf(input, ranks);
      const Splits to = splitsOf(input, ranks);
      at::Tensor received = zerosOf(sumOf(from));
      return communicator.allToAll(received, zerosOf(sumOf(to)), from, to);
    }
  }
}

}  // namespace

void fuzzWireHeaders(FuzzedBytes& input) {
  const auto ranks = static_cast<int>(input.from(2, 4));
  const auto rank = static_cast<int>(input.from(0, ranks - 1));
  // A host each: what those of one host say to each other in its memory is another target's.
  CpuCommunicator communicator(std::make_unique<MadeUpWire>(rank, ranks, input),
                               std::make_shared<const HostTopology>(HostTopology::oneRankPerHost(ranks)));
  try {
    for (int64_t calls = input.from(1, 3); calls > 0; --calls) {
      communicator.setProgram(fingerprintOf(madeUpOperation(input, ranks)));
      exchange(input, communicator);
    }
  } catch (const RefusedError&) {
    // A peer may say that it has refused its arguments.
  } catch (const c10::DistNetworkError& error) {
    TORCH_INTERNAL_ASSERT(std::string(error.what_without_backtrace()).starts_with("the ranks do not make the same"));
  }
}

}  // namespace bagua

// NOLINTNEXTLINE(readability-identifier-naming): libFuzzer calls it so
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  bagua::fuzz::FuzzedBytes input(data, size);
  bagua::fuzzWireHeaders(input);
  return 0;
}
