// SPDX-License-Identifier: Apache-2.0
// The functions that NCCL finds by name in libnccl-net-bagua.so.
#include <c10/util/Exception.h>

#include <cstring>
#include <limits>
#include <utility>

#include "backend/nccl_net/log.h"
#include "backend/nccl_net/network.h"
#include "backend/operation/operation.h"
#include "backend/security/job_security.h"

namespace bagua::nccl_net {
namespace {

// No exception passes into NCCL, which is C: it is a line of the log and an error.
template <class Function>
Result guarded(const Function& function) {
  try {
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

// Where there is no transport, this succeeds nevertheless, and listen() fails: if NCCL cannot initialise a plugin, it
// takes its own sockets, which do not encrypt.
Result begin(Logger logger) {
  ncclLog = logger;
  static_cast<void>(guarded([] {
    const auto address = Network::ofProcess().transport()->address().address;
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

// As begin() does, this succeeds where there is no network, and listen() fails.
const Network::Device& ownDevice() {
  static const Network::Device unknown;
  try {
    // NCCL keeps the pointer to the name.
    static const auto* const device = new Network::Device(Network::device());  // NOLINT
    return *device;
  } catch (const std::exception& error) {
    warn(error.what());
    return unknown;
  }
}

void describe(PropertiesV10& properties) {
  const Network::Device& device = ownDevice();
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

Result getPropertiesV10(int, PropertiesV10* properties) {
  return guarded([&] {
    describe(*properties);
    return Result::kSuccess;
  });
}

Result getPropertiesV11(int, PropertiesV11* properties) {
  return guarded([&] {
    describe(properties->common);
    properties->maxMultiRequestSize = 1;
    return Result::kSuccess;
  });
}

Result listen(void*, int, void* handle, void** listening) {
  return guarded([&] {
    auto listener = std::make_unique<Listener>(Network::ofProcess().transport());
    const Handle own = listener->handle();
    std::memcpy(handle, &own, sizeof(own));
    *listening = listener.release();
    return Result::kSuccess;
  });
}

Result connect(void* context, int, void* handle, void** sending, DeviceHandle**) {
  return guarded([&] {
    Handle peer;
    std::memcpy(&peer, handle, sizeof(peer));
    Result result = Result::kSuccess;
    *sending = Network::ofProcess().connect(context, peer, result).release();
    return result;
  });
}

Result accept(void* listening, void** receiving, DeviceHandle**) {
  return guarded([&] {
    *receiving = static_cast<Listener*>(listening)->accept().release();
    return Result::kSuccess;
  });
}

Result regMr(void*, void* data, size_t size, int type, void** registration) {
  if (type != kPtrHost) return Result::kInvalidUsage;
  return guarded([&] {
    *registration = new Connection::Range{.data = static_cast<const uint8_t*>(data), .size = size};  // NOLINT
    return Result::kSuccess;
  });
}

Result regMrDmaBuf(void*, void*, size_t, int, uint64_t, int, void**) { return Result::kInvalidUsage; }

Result deregMr(void* connection, void* registration) {
  return guarded([&] {
    const std::unique_ptr<Connection::Range> range(static_cast<Connection::Range*>(registration));
    if (range) static_cast<Connection*>(connection)->forget(*range);
    return Result::kSuccess;
  });
}

Result isend(void* sending, void* data, size_t size, int tag, void*, void*, void** request) {
  // NCCL counts received bytes in an int.
  if (size > std::numeric_limits<int>::max()) return Result::kInvalidArgument;
  return guarded([&] {
    Connection::Request* made = nullptr;
    const Result result = static_cast<Connection*>(sending)->send({static_cast<const uint8_t*>(data), size}, tag, made);
    *request = made;
    return result;
  });
}

// `request` may come with a wish (not to be told of the end), which need not be heard.
Result irecv(void* receiving, int count, void** data, size_t* sizes, int* tags, void**, void**, void** request) {
  if (count < 1 || count > kMostGrouped) return Result::kInvalidArgument;
  return guarded([&] {
    std::vector<Connection::Part> parts;
    for (int i = 0; i < count; ++i) parts.push_back({static_cast<uint8_t*>(data[i]), sizes[i], tags[i]});
    Connection::Request* made = nullptr;
    const Result result = static_cast<Connection*>(receiving)->receive(parts, made);
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
    auto& tested = *static_cast<Connection::Request*>(request);
    bool isComplete = false;
    const Result result = tested.connection().test(tested, isComplete, sizes);
    *isDone = isComplete ? 1 : 0;
    return result;
  });
}

Result closeConnection(void* connection) {
  return guarded([&] {
    delete static_cast<Connection*>(connection);  // NOLINT(cppcoreguidelines-owning-memory)
    return Result::kSuccess;
  });
}

Result closeListen(void* listening) {
  return guarded([&] {
    delete static_cast<Listener*>(listening);  // NOLINT(cppcoreguidelines-owning-memory)
    return Result::kSuccess;
  });
}

Result initV10(Logger logger, ProfilerCallback) { return begin(logger); }
Result listenV10(int device, void* handle, void** listening) { return listen(nullptr, device, handle, listening); }
Result connectV10(int device, CommConfig*, void* handle, void** sending, DeviceHandle** sendDevice) {
  return connect(nullptr, device, handle, sending, sendDevice);
}

// One for each communicator. It is a name, and nothing else.
struct Context {};

Result initV11(void** context, uint64_t, CommConfig*, Logger logger, ProfilerCallback) {
  *context = new Context;  // NOLINT(cppcoreguidelines-owning-memory)
  return begin(logger);
}
Result finalizeV11(void* context) {
  return guarded([&] {
    const std::unique_ptr<Context> owned(static_cast<Context*>(context));
    Network::ofProcess().forget(context);
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
                             .closeSend = closeConnection,
                             .closeRecv = closeConnection,
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
