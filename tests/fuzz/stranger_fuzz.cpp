// SPDX-License-Identifier: Apache-2.0
// What somebody who has not the job's secret sends to the port where a process listens: nothing of it gets through the
// handshake. And what the store holds where a rank should have written: nothing that was forged is believed.
#include <c10/util/Exception.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "backend/net/stream.h"
#include "backend/security/job_security.h"
#include "tests/fuzz/fuzzed_bytes.h"

namespace bagua {
namespace {

using fuzz::FuzzedBytes;
using net::EncryptedStream;

const JobSecurity& security() {
  static const auto made = makeJobSecurity({.secret = "the secret of nobody in particular"});
  return *made;
}

// Two ends of one connection.
class Connection {
 public:
  Connection() {
    std::array<int, 2> ends{};
    const int made = socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends.data());
    TORCH_CHECK(made == 0, "no sockets");
    ours_ = UnsharedFile(ends[0]);
    theirs_ = UnsharedFile(ends[1]);
  }
  UnsharedFile takeOurs() { return std::move(ours_); }
  UnsharedFile takeTheirs() { return std::move(theirs_); }
  [[nodiscard]] int ours() const { return ours_.number(); }
  // Whether all of it has gone.
  bool say(const void* bytes, size_t size) {
    return send(theirs_.number(), bytes, size, MSG_NOSIGNAL) == static_cast<ssize_t>(size);
  }
  void end() { theirs_ = UnsharedFile(); }

 private:
  UnsharedFile ours_;
  UnsharedFile theirs_;
};

// What a rank would say first, for the fuzzer to change.
std::vector<uint8_t> greeting() {
  Connection connection;
  const auto stream = security().encryption()->connect(connection.ours());
  TORCH_INTERNAL_ASSERT(stream->handshake() == EncryptedStream::Handshake::kUnderWay);
  std::vector<uint8_t> bytes(4096);
  net::Stream theirs(connection.takeTheirs());
  const ssize_t size = theirs.receive(bytes.data(), bytes.size());
  TORCH_INTERNAL_ASSERT(size > 0);
  bytes.resize(static_cast<size_t>(size));
  return bytes;
}

void fuzzHandshake(FuzzedBytes& input) {
  Connection connection;
  const auto stream = security().encryption()->accept(connection.ours());
  std::vector<uint8_t> bytes;
  if (input.coin()) {
    bytes = greeting();
    for (int64_t changes = input.from(1, 4); changes > 0; --changes) {
      bytes[static_cast<size_t>(input.from(0, static_cast<int64_t>(bytes.size()) - 1))] ^= input.take<uint8_t>();
    }
    bytes.resize(static_cast<size_t>(input.from(0, static_cast<int64_t>(bytes.size()))));
  }
  auto state = EncryptedStream::Handshake::kUnderWay;
  // In pieces, as they may come.
  while (state == EncryptedStream::Handshake::kUnderWay && (!bytes.empty() || input.left() > 0)) {
    const std::string more = input.text(255);
    bytes.insert(bytes.end(), more.begin(), more.end());
    connection.say(bytes.data(), bytes.size());
    bytes.clear();
    state = stream->handshake();
  }
  if (state == EncryptedStream::Handshake::kUnderWay) {
    connection.end();
    state = stream->handshake();
  }
  TORCH_INTERNAL_ASSERT(state == EncryptedStream::Handshake::kFailed || state == EncryptedStream::Handshake::kLost,
                        "a stranger was let in");
  TORCH_INTERNAL_ASSERT(!stream->error().empty());
}

void fuzzSealed(FuzzedBytes& input) {
  std::vector<uint8_t> bytes;
  if (input.coin()) {
    bytes = security().seal("name", {1, 2, 3, 4});
    bytes[static_cast<size_t>(input.from(0, static_cast<int64_t>(bytes.size()) - 1))] ^=
        1U + input.take<uint8_t>() % 255U;
  }
  const std::string more = input.text(255);
  bytes.insert(bytes.end(), more.begin(), more.end());
  TORCH_INTERNAL_ASSERT(!security().open("name", bytes), "a forged value was believed");
}

}  // namespace

void fuzzStranger(FuzzedBytes& input) {
  if (input.coin()) return fuzzHandshake(input);
  fuzzSealed(input);
}

}  // namespace bagua

// NOLINTNEXTLINE(readability-identifier-naming): libFuzzer calls it so
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  bagua::fuzz::FuzzedBytes input(data, size);
  bagua::fuzzStranger(input);
  return 0;
}
