// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "backend/net/transport.h"
#include "tests/support/wire_tests.h"

namespace bagua::net {

// Two processes in this one, and a group of both.
class TwoTransports : public ::testing::Test {
 protected:
  void SetUp() override { joinAs(7); }
  void joinAs(uint64_t id, const std::vector<int>& neighbours = {}) {
    const std::vector<ProcessAddress> addresses{first_->address(), second_->address()};
    groups_ = {first_->join(id, 0, addresses, neighbours), second_->join(id, 1, addresses, neighbours)};
  }

  [[nodiscard]] Place at(Bytes& place) const { return {.data = place.data(), .size = place.size(), .signal = signal_}; }
  [[nodiscard]] Message all(const Bytes& sent, const Bytes& context = {}) const {
    return {.data = sent.data(), .size = sent.size(), .ready = sent.size(), .context = context, .signal = signal_};
  }
  // Whether a message arrives from the first process at the second, in the group that both have joined last.
  [[nodiscard]] bool arrives(uint64_t stream, const Bytes& sent) {
    Bytes received(sent.size());
    const auto receiving = groups_[1]->receive(0, stream, 0, at(received));
    const auto sending = groups_[0]->send(1, stream, 0, all(sent));
    return comes(*signal_, [&] { return receiving->state().isComplete() && sending->state().isComplete; }) &&
           received == sent;
  }

  std::shared_ptr<Transport> first_ = Transport::listenAt("127.0.0.1", 4);
  std::shared_ptr<Transport> second_ = Transport::listenAt("127.0.0.1", 4);
  std::vector<std::shared_ptr<Group>> groups_;
  std::shared_ptr<Signal> signal_ = std::make_shared<Signal>();
};

}  // namespace bagua::net
