// SPDX-License-Identifier: Apache-2.0
// What a rank of another host says with its first message: the program it is in, how much it sends and expects, and
// whether it refuses. Any bytes. The exchange ends with an exception, or brings what was sent.
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "backend/cpu/socket_wire.h"
#include "backend/operation/peer_errors.h"
#include "tests/fuzz/fuzzed_bytes.h"

namespace bagua {
namespace {

using fuzz::FuzzedBytes;

// As SocketWire's.
struct Preamble {
  ProgramFingerprint program;
  int64_t sent = 0;
  int64_t expected = 0;
  int64_t refusing = -1;
};

Operation madeUpOperation(FuzzedBytes& input) {
  static constexpr std::array kNames = {"bagua:all_to_all", "", "bagua:all_gather_into_tensor_coalesced_and_more"};
  Operation operation{.type = c10d::OpType::ALLTOALL_BASE,
                      .name = kNames.at(input.take<uint8_t>() % kNames.size()),
                      .dtype = input.coin() ? at::kFloat : at::kByte,
                      .numel = input.from(0, 64)};
  operation.sequence = input.take<uint8_t>();
  operation.peer = static_cast<int>(input.from(-1, 1));
  operation.reduceOp = static_cast<int>(input.from(-1, 9));
  if (input.take<uint8_t>() % 4 != 0) operation.commonNumel = Operation::kAnyNumel;
  if (input.coin()) operation.configuration = std::make_shared<const std::string>(input.text(64));
  return operation;
}

// What goes with this rank's own, mostly, but for some bytes; or anything.
std::vector<uint8_t> saidBy(FuzzedBytes& input, const Preamble& fitting) {
  std::vector<uint8_t> said(sizeof(fitting));
  std::memcpy(said.data(), &fitting, sizeof(fitting));
  if (input.take<uint8_t>() % 8 == 0) {
    said.resize(static_cast<size_t>(input.from(0, net::kMostContext)));
    input.fill(said.data(), said.size());
    return said;
  }
  for (int64_t changes = input.take<uint8_t>() % 8; changes > 4; --changes) {
    said[static_cast<size_t>(input.from(0, sizeof(fitting) - 1))] = input.take<uint8_t>();
  }
  return said;
}

void fuzzPreamble(FuzzedBytes& input) {
  static const auto own = net::Transport::listenAt("127.0.0.1", 1);
  static const auto peers = net::Transport::listenAt("127.0.0.1", 1);
  static const std::vector<net::ProcessAddress> addresses{own->address(), peers->address()};
  static uint64_t group = 0;
  ++group;
  SocketWire wire(own->join(group, 0, addresses));
  const auto peer = peers->join(group, 1, addresses);
  const ProgramFingerprint program = fingerprintOf(madeUpOperation(input));
  wire.setProgram(program);
  const int64_t refusing = input.take<uint8_t>() % 8 == 0 ? input.from(0, 1) : -1;
  if (refusing >= 0) wire.refuse(static_cast<int>(refusing));
  const at::Tensor sent = input.tensor(input.from(0, 200));
  at::Tensor received = at::zeros({input.from(0, 200)}, at::kByte);
  const auto said = saidBy(input, {.program = program, .sent = received.numel(), .expected = sent.numel()});
  const at::Tensor payload = input.tensor(received.numel());
  const auto size = static_cast<uint64_t>(payload.numel());
  const auto sending = peer->send(
      0, program.sequence, 0,
      {.data = static_cast<const uint8_t*>(payload.const_data_ptr()), .size = size, .ready = size, .context = said});
  try {
    wire.exchange({{1, sent, received}}, std::chrono::steady_clock::now() + std::chrono::seconds(20));
    TORCH_INTERNAL_ASSERT(at::equal(received, payload));
  } catch (const RefusedError&) {
    return;  // A peer may say that it has refused its arguments.
  } catch (const MismatchError&) {
    TORCH_INTERNAL_ASSERT(received.eq(0).all().item<bool>(), "a byte was used");
  }
}

}  // namespace
}  // namespace bagua

// NOLINTNEXTLINE(readability-identifier-naming): libFuzzer calls it so
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  bagua::fuzz::FuzzedBytes input(data, size);
  bagua::fuzzPreamble(input);
  return 0;
}
