// SPDX-License-Identifier: Apache-2.0
// With certificates both sides prove that they know the job secret. The proofs of the two sides differ, so that a
// stranger who holds a certificate cannot answer with what it was told. A connection that breaks before proves nothing.
#include <gtest/gtest.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <memory>

#include "backend/net/transport.h"
#include "backend/security/job_security.h"
#include "tests/support/wire_tests.h"

namespace bagua::net {
namespace {

const std::filesystem::path kFolder = BAGUA_TEST_CERTIFICATES;
using Context = std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)>;
using Connection = std::unique_ptr<SSL, decltype(&SSL_free)>;

// Somebody whom the job's authority knows, and who knows nothing of the secret.
Context contextOfCertificate() {
  Context context(SSL_CTX_new(TLS_method()), &SSL_CTX_free);
  EXPECT_EQ(SSL_CTX_use_certificate_chain_file(context.get(), (kFolder / "rank.pem").c_str()), 1);
  EXPECT_EQ(SSL_CTX_use_PrivateKey_file(context.get(), (kFolder / "rank_key.pem").c_str(), SSL_FILETYPE_PEM), 1);
  return context;
}

std::shared_ptr<Transport> transportOfJob() {
  const config::TlsFiles files{
      .certificate = kFolder / "rank.pem", .key = kFolder / "rank_key.pem", .authority = kFolder / "authority.pem"};
  const auto security = makeJobSecurity({.secret = "the secret of this job", .certificates = files});
  return Transport::listenAt("127.0.0.1", 2, security->encryption());
}

// The limit is that of every call.
void limitTimeOf(const UnsharedFile& socket) {
  const timeval limit{.tv_sec = 10, .tv_usec = 0};
  ASSERT_EQ(setsockopt(socket.number(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)), 0);
}

TEST(EchoedProof, OfTheOtherSideIsRefused) {
  const auto transport = transportOfJob();
  // It listens once a group of it has a peer.
  const auto peer = transportOfJob();
  const auto group = transport->join(7, 0, {transport->address(), peer->address()});
  const SocketAddress address = transport->address().address;
  const UnsharedFile socket(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(connect(socket.number(), address.get(), address.size()), 0) << std::strerror(errno);
  ASSERT_NO_FATAL_FAILURE(limitTimeOf(socket));

  const Context context = contextOfCertificate();
  const Connection connection(SSL_new(context.get()), &SSL_free);
  ASSERT_EQ(SSL_set_fd(connection.get(), socket.number()), 1);
  ASSERT_EQ(SSL_connect(connection.get()), 1);
  std::array<uint8_t, 32> proof{};
  ASSERT_EQ(SSL_read(connection.get(), proof.data(), proof.size()), static_cast<int>(proof.size()));
  ASSERT_EQ(SSL_write(connection.get(), proof.data(), proof.size()), static_cast<int>(proof.size()));

  // Who is let in is waited for; who is refused finds the connection closed.
  pollfd closed{.fd = socket.number(), .events = POLLIN, .revents = 0};
  ASSERT_EQ(poll(&closed, 1, 5'000), 1) << "the server goes on with a client that has echoed its proof";
  EXPECT_LE(SSL_read(connection.get(), proof.data(), proof.size()), 0);
}

// A line may break at the wrong moment: the peer is known, so that nobody else may be what answers there.
TEST(AwaitedProof, ThatDoesNotComeAsTheConnectionEndsIsAwaitedOnAnother) {
  const auto transport = transportOfJob();
  const UnsharedFile listening = listenAt("127.0.0.1");
  std::shared_ptr<Group> group;
  {
    // It comes by itself, and ends. Connections to it lead to this test.
    const auto peer = transportOfJob();
    group = transport->join(7, 0, {transport->address(), {peer->address().process, addressOf(listening)}});
    const auto theirs = peer->join(7, 1, {transport->address(), peer->address()});
    const auto signal = std::make_shared<Signal>();
    const auto receiving = group->receive(1, 1, 0, {.signal = signal});
    const auto sending = theirs->send(0, 1, 0, {});
    ASSERT_TRUE(comes(*signal, [&] { return receiving->state().isComplete(); }));
  }
  const Context context = contextOfCertificate();
  for (int turn = 0; turn < 2; ++turn) {
    pollfd coming{.fd = listening.number(), .events = POLLIN, .revents = 0};
    ASSERT_EQ(poll(&coming, 1, 10'000), 1) << "after " << turn << " connections";
    const UnsharedFile socket(accept4(listening.number(), nullptr, nullptr, SOCK_CLOEXEC));
    ASSERT_NO_FATAL_FAILURE(limitTimeOf(socket));
    const Connection connection(SSL_new(context.get()), &SSL_free);
    ASSERT_EQ(SSL_set_fd(connection.get(), socket.number()), 1);
    ASSERT_EQ(SSL_accept(connection.get()), 1);
    // The other side has said its proof, and waits for this one's.
    std::array<uint8_t, 32> proof{};
    ASSERT_EQ(SSL_read(connection.get(), proof.data(), proof.size()), static_cast<int>(proof.size()));
  }
}

}  // namespace
}  // namespace bagua::net
