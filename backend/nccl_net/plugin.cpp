// SPDX-License-Identifier: Apache-2.0
// The functions that NCCL finds by name in libnccl-net-bagua.so.
#include <c10/util/Exception.h>

#include <cstring>
#include <limits>

#include "backend/nccl_net/context.h"
#include "backend/nccl_net/device.h"
#include "backend/nccl_net/log.h"
#include "backend/net/process_transport.h"
#include "backend/operation/operation.h"
#include "backend/os/process_mark.h"
#include "backend/security/job_security.h"

namespace bagua::nccl_net {
namespace {

// Whether NCCL has called this library first in a process that this one was forked from.
bool isForkedChild() {
  static const ProcessMark mark;
  return mark.isFromParent();
}

// No exception passes into NCCL, which is C: it is a line of the log and an error.
template <class Function>
Result guarded(const Function& function) {
  try {
    TORCH_CHECK_VALUE(!isForkedChild(),
                      "this process was forked from one that uses NCCL, and has none of the threads that serve its "
                      "connections: start processes with the method spawn");
    return function();
  } catch (const c10::ValueError&) {
    warn(messageOf(std::current_exception()));
    return Result::kInvalidUsage;
  } catch (const c10::DistNetworkError&) {
    warn(messageOf(std::current_exception()));
    return Result::kRemoteError;
  } catch (...) {
    warn(messageOf(std::current_exception()));
    return Result::kInternalError;
  }
}

// Where there is no transport, or it is a parent's, this succeeds nevertheless, and listen() fails: if NCCL cannot
// initialise a plugin, it takes its own sockets, which do not encrypt.
Result begin(Logger logger) {
  ncclLog = logger;
  static_cast<void>(guarded([] {
    const auto address = net::processTransport()->address().address;
    const auto security = jobSecurity();
    const std::string protection =
        security ? "encrypted, with the job secret " + security->fingerprint() : "not encrypted: no job secret is set";
    tell(LogLevel::kInfo, kLogInit | kLogNet, "at " + address.text() + ", " + protection);
    return Result::kSuccess;
  }));
  return Result::kSuccess;
}

Result devices(int* count) {
  *count = 1;
  return Result::kSuccess;
}

void describe(PropertiesV10& properties) {
  const Device& device = ownDevice();
  properties = {};
  properties.name = const_cast<char*>(device.interface.c_str());  // NOLINT(cppcoreguidelines-pro-type-const-cast)
  properties.ptrSupport = kPtrHost;
  properties.speed = device.speed;
  // Each rank chooses algorithms by the latency, and all have to choose the same: what one has measured is nothing to
  // choose by. NCCL adds its own estimate.
  properties.latency = 0;
  properties.maxComms = 65'536;
  properties.maxRecvs = kMostGrouped;
  properties.virtualDevice.count = 1;
  properties.maxP2pBytes = kMostBytes;
  properties.maxCollBytes = kMostBytes;
}

// As begin() does, these always succeed.
Result getPropertiesV10(int, PropertiesV10* properties) {
  describe(*properties);
  return Result::kSuccess;
}

Result getPropertiesV11(int, PropertiesV11* properties) {
  describe(properties->common);
  properties->maxMultiRequestSize = 1;
  return Result::kSuccess;
}

Result listen(void* context, int, void* handle, void** listening) {
  return guarded([&] {
    ListenComm& made = static_cast<Context*>(context)->listen();
    const Handle own = made.handle();
    std::memcpy(handle, &own, sizeof(own));
    *listening = &made;
    return Result::kSuccess;
  });
}

Result connect(void* context, int, void* handle, void** sending, DeviceHandle**) {
  return guarded([&] {
    Handle peer;
    std::memcpy(&peer, handle, sizeof(peer));
    Result result = Result::kSuccess;
    *sending = static_cast<Context*>(context)->connect(peer, result).release();
    return result;
  });
}

Result accept(void* listening, void** receiving, DeviceHandle**) {
  return guarded([&] {
    *receiving = static_cast<ListenComm*>(listening)->accept().release();
    return Result::kSuccess;
  });
}

Result regMr(void*, void* data, size_t size, int type, void** registration) {
  if (type != kPtrHost) return Result::kInvalidUsage;
  return guarded([&] {
    *registration = new Comm::Range{.data = static_cast<const uint8_t*>(data), .size = size};  // NOLINT
    return Result::kSuccess;
  });
}

Result regMrDmaBuf(void*, void*, size_t, int, uint64_t, int, void**) { return Result::kInvalidUsage; }

Result deregMr(void* comm, void* registration) {
  return guarded([&] {
    const std::unique_ptr<Comm::Range> range(static_cast<Comm::Range*>(registration));
    if (range) static_cast<Comm*>(comm)->forget(*range);
    return Result::kSuccess;
  });
}

Result isend(void* sending, void* data, size_t size, int tag, void*, void*, void** request) {
  // NCCL counts received bytes in an int.
  if (size > std::numeric_limits<int>::max()) return Result::kInvalidArgument;
  return guarded([&] {
    Comm::Request* made = nullptr;
    const Result result = static_cast<Comm*>(sending)->send({static_cast<const uint8_t*>(data), size}, tag, made);
    *request = made;
    return result;
  });
}

// `request` may come with a wish (not to be told of the end), which need not be heard.
Result irecv(void* receiving, int count, void** data, size_t* sizes, int* tags, void**, void**, void** request) {
  if (count < 1 || count > kMostGrouped) return Result::kInvalidArgument;
  return guarded([&] {
    std::vector<Comm::Part> parts;
    for (int i = 0; i < count; ++i) parts.push_back({static_cast<uint8_t*>(data[i]), sizes[i], tags[i]});
    Comm::Request* made = nullptr;
    const Result result = static_cast<Comm*>(receiving)->receive(parts, made);
    *request = made;
    return result;
  });
}

// What has come to the memory of a host is there.
Result iflush(void*, int, void**, int*, void**, void** request) {
  *request = nullptr;
  return Result::kSuccess;
}

Result test(void* request, int* isDone, int* sizes) {
  return guarded([&] {
    auto& tested = *static_cast<Comm::Request*>(request);
    bool isComplete = false;
    const Result result = tested.comm().test(tested, isComplete, sizes);
    *isDone = isComplete ? 1 : 0;
    return result;
  });
}

Result closeComm(void* comm) {
  return guarded([&] {
    delete static_cast<Comm*>(comm);  // NOLINT(cppcoreguidelines-owning-memory)
    return Result::kSuccess;
  });
}

Result closeListen(void* listening) {
  return guarded([&] {
    const auto& closed = *static_cast<ListenComm*>(listening);
    closed.context().close(closed);
    return Result::kSuccess;
  });
}

// All communicators have one. NCCL does not say when one ends, and initialises again only when there is none.
Context& contextOfV10() {
  static auto* const context = new Context;  // NOLINT(cppcoreguidelines-owning-memory)
  return *context;
}
Result initV10(Logger logger, ProfilerCallback) {
  begin(logger);
  static_cast<void>(guarded([] {
    contextOfV10().clear();
    return Result::kSuccess;
  }));
  return Result::kSuccess;
}
Result listenV10(int device, void* handle, void** listening) {
  return listen(&contextOfV10(), device, handle, listening);
}
Result connectV10(int device, CommConfig*, void* handle, void** sending, DeviceHandle** sendDevice) {
  return connect(&contextOfV10(), device, handle, sending, sendDevice);
}

Result initV11(void** context, uint64_t, CommConfig*, Logger logger, ProfilerCallback) {
  *context = new Context;  // NOLINT(cppcoreguidelines-owning-memory)
  return begin(logger);
}
Result finalizeV11(void* context) {
  return guarded([&] {
    delete static_cast<Context*>(context);  // NOLINT(cppcoreguidelines-owning-memory)
    return Result::kSuccess;
  });
}

constexpr Transfer kTransfer{.accept = accept,
                             .regMr = regMr,
                             .regMrDmaBuf = regMrDmaBuf,
                             .deregMr = deregMr,
                             .isend = isend,
                             .irecv = irecv,
                             .iflush = iflush,
                             .test = test,
                             .closeSend = closeComm,
                             .closeRecv = closeComm,
                             .closeListen = closeListen,
                             .getDeviceMr = nullptr,
                             .irecvConsumed = nullptr,
                             .makeVDevice = nullptr};

}  // namespace
}  // namespace bagua::nccl_net

extern "C" {
// NOLINTBEGIN(readability-identifier-naming): NCCL's names
extern const bagua::nccl_net::NetV10 ncclNetPlugin_v10;
extern const bagua::nccl_net::NetV11 ncclNetPlugin_v11;
const bagua::nccl_net::NetV10 ncclNetPlugin_v10{.name = "bagua",
                                                .init = bagua::nccl_net::initV10,
                                                .devices = bagua::nccl_net::devices,
                                                .getProperties = bagua::nccl_net::getPropertiesV10,
                                                .listen = bagua::nccl_net::listenV10,
                                                .connect = bagua::nccl_net::connectV10,
                                                .transfer = bagua::nccl_net::kTransfer};
const bagua::nccl_net::NetV11 ncclNetPlugin_v11{.name = "bagua",
                                                .init = bagua::nccl_net::initV11,
                                                .devices = bagua::nccl_net::devices,
                                                .getProperties = bagua::nccl_net::getPropertiesV11,
                                                .listen = bagua::nccl_net::listen,
                                                .connect = bagua::nccl_net::connect,
                                                .transfer = bagua::nccl_net::kTransfer,
                                                .finalize = bagua::nccl_net::finalizeV11,
                                                .setNetAttr = nullptr};
// NOLINTEND(readability-identifier-naming)
}
