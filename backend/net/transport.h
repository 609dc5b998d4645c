// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "backend/net/event_loop.h"
#include "backend/net/group.h"
#include "backend/net/group_table.h"
#include "backend/net/link.h"
#include "backend/net/listener.h"
#include "backend/net/process_address.h"
#include "backend/net/stream.h"
#include "backend/os/process_mark.h"

namespace bagua::net {

// A process has this of the network between hosts: a port where it listens, a link to every process that it has spoken
// to, and the groups whose messages these carry. Any thread may call.
class Transport final : public std::enable_shared_from_this<Transport> {
 public:
  // Listens at `address`, at one of `ports`, and answers from the first join() or expect() on. With `encryption`, it
  // speaks only with processes that know the secret. A link ends when the peer's kernel has acknowledged nothing for
  // `patience`. Throws DistNetworkError.
  static std::shared_ptr<Transport> listenAt(const std::string& address, int mostConnections,
                                             std::shared_ptr<const Encryption> encryption = nullptr,
                                             std::chrono::milliseconds patience = kPatienceWithSilence,
                                             config::PortRange ports = {});
  ~Transport();
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  [[nodiscard]] const ProcessAddress& address() const { return address_; }
  // `id` is the same on all ranks, and no other group's. `ranks` are all ranks' addresses, `neighbours` the ranks of
  // this host. Throws DistNetworkError: see GroupTable::join().
  std::shared_ptr<Group> join(uint64_t id, int rank, const std::vector<ProcessAddress>& ranks,
                              const std::vector<int>& neighbours = {});
  // This process will join the group when it knows the other ranks: what comes before waits in the result. Throws as
  // join() does.
  std::shared_ptr<Inbox> expect(uint64_t id);
  // This process will not join the group any more, if it has not yet: what has come for it is thrown away, and whoever
  // sends for it hears of that as of a leave.
  void abandon(uint64_t group) { tellSenders(group, table_.abandon(group)); }
  // Waits until peers have told that all has come which has been sent to them, but not for long: what is still in the
  // kernel when a process ends can be lost.
  void finish();
  // At the end of the process, after which libraries free what the loops use. Nothing is sent or received any more.
  void halt();
  // Ends every link, as the end of this process would.
  void loseLinksForTest();

 private:
  friend class Group;
  friend class Link;
  friend class Listener;

  Transport(UnsharedFile listening, Link::Opening opening);
  // Lets connections in, from the first call on.
  void answer();
  // Returns the link over which this process speaks to a peer. It is made where there is none, or only a lost one.
  std::shared_ptr<Link> linkTo(const ProcessId& peer);
  // Returns what there is, also a lost one.
  std::shared_ptr<Link> knownLink(const ProcessId& peer);
  [[nodiscard]] std::vector<std::shared_ptr<Link>> allLinks();
  // A connection has come in and said whose it is.
  void welcome(const Hello& hello, Stream stream);
  // Tells whoever has opened a connection that this is no end of its link.
  void refuse(const Hello& hello, Stream stream);
  // A group ends, which has spoken with its peers over these links.
  void leave(uint64_t group, std::vector<uint64_t> links) { tellSenders(group, table_.leave(group, std::move(links))); }
  // Tells those from whom something has come for a group that was left, or who have asked, and who do not know of that.
  void tellSenders(uint64_t group, const std::shared_ptr<Inbox>& inbox);
  void tellSender(uint64_t group, Link& link);

  // --- Links call these on the loop's thread; onLost() on any. See FrameSink for the first.
  Delivery begin(const Frame& frame, const std::vector<uint8_t>& context, const std::shared_ptr<Link>& link);
  // A rank asks to be told when this process leaves a group.
  void onAskForLeave(const Frame& frame, Link& link);
  // A rank has left a group, after so many data frames.
  void onLeave(const Frame& frame);
  // The peer takes nothing for a group, and has sent nothing for it over this link.
  void onAbsent(const Link& link, uint64_t group);
  // The link has ended, with what was under way on it.
  void onLost(const Link& link, const std::string& error);

  const Link::Opening opening_;
  UnsharedFile listening_;
  ProcessAddress address_;
  GroupTable table_;
  std::mutex mutex_;
  // The last link made to each process.
  std::map<ProcessId, std::shared_ptr<Link>> links_;
  // Where the processes of all groups listen: a link that a peer has opened needs it, too.
  std::map<ProcessId, SocketAddress> addresses_;
  bool isAnswering_ = false;
  const std::shared_ptr<EventLoop> loop_ = std::make_shared<EventLoop>();
  // Connections that have come in stay here until they have said whose they are: with encryption this is a thread of
  // its own, so that handshakes keep no message waiting.
  const std::shared_ptr<EventLoop> guestLoop_;
};

// A group that this process may join: when this ends, what has come for a group that it has not joined is thrown away.
class Membership {
 public:
  Membership(std::shared_ptr<Transport> transport, uint64_t group) : transport_(std::move(transport)), group_(group) {}
  ~Membership() {
    // A forked child has no lock that it could take: its parent may have held it.
    if (mark_.isFromParent()) {
      neverDestroy(std::move(transport_));
    } else {
      transport_->abandon(group_);
    }
  }
  Membership(const Membership&) = delete;
  Membership& operator=(const Membership&) = delete;

 private:
  const ProcessMark mark_;
  std::shared_ptr<Transport> transport_;
  const uint64_t group_;
};

}  // namespace bagua::net
