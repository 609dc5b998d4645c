// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

// What NCCL and a net plugin call each other by: field by field the layout of ncclNet_v10_t and ncclNet_v11_t in NCCL's
// src/include/plugin/net/ (2.28.9, (c) NVIDIA Corporation, BSD 3-clause), written anew, so that the plugin is built and
// tested where there is no NCCL: the packages of NCCL do not have these headers.
namespace bagua::nccl_net {

// ncclResult_t.
enum class Result : int {
  kSuccess = 0,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  // Another rank, or the way to it.
  kRemoteError = 6,
};

enum class LogLevel : int { kWarn = 2, kInfo = 3 };
// Parts of NCCL that a line of its log belongs to.
inline constexpr unsigned long kLogInit = 0x1;
inline constexpr unsigned long kLogNet = 0x10;
using Logger = void (*)(LogLevel level, unsigned long parts, const char* file, int line, const char* format, ...);
using ProfilerCallback = Result (*)(void** event, int type, void* parent, int64_t pluginId, void* data);

inline constexpr size_t kHandleBytes = 128;
inline constexpr int kPtrHost = 1;
// Requests of a comm that NCCL may have under way, for each receive that may be grouped.
inline constexpr int kMostRequests = 32;
inline constexpr size_t kMostBytes = size_t{1} << 40U;
inline constexpr int kMostDevicesOfANic = 4;

struct VirtualDevice {
  int count;
  int devices[kMostDevicesOfANic];
};

struct PropertiesV10 {
  char* name;
  char* pciPath;
  uint64_t guid;
  int ptrSupport;
  int regIsGlobal;
  int forceFlush;
  int speed;  // Mbit/s
  int port;
  float latency;  // us
  int maxComms;
  int maxRecvs;
  int netDeviceType;
  int netDeviceVersion;
  VirtualDevice virtualDevice;
  size_t maxP2pBytes;
  size_t maxCollBytes;
};

struct PropertiesV11 {
  PropertiesV10 common;
  int maxMultiRequestSize;
};

struct CommConfig {
  int trafficClass;
};

// What NCCL says of traffic to come. We do not use it.
struct Attributes;
// What a device would send by. We have none.
struct DeviceHandle;

// The functions that are alike in both versions, in their order.
struct Transfer {
  Result (*accept)(void* listening, void** receiving, DeviceHandle** device);
  Result (*regMr)(void* comm, void* data, size_t size, int type, void** registration);
  Result (*regMrDmaBuf)(void* comm, void* data, size_t size, int type, uint64_t offset, int file, void** registration);
  Result (*deregMr)(void* comm, void* registration);
  Result (*isend)(void* sending, void* data, size_t size, int tag, void* registration, void* profile, void** request);
  Result (*irecv)(void* receiving, int count, void** data, size_t* sizes, int* tags, void** registrations,
                  void** profiles, void** request);
  Result (*iflush)(void* receiving, int count, void** data, int* sizes, void** registrations, void** request);
  Result (*test)(void* request, int* isDone, int* sizes);
  Result (*closeSend)(void* sending);
  Result (*closeRecv)(void* receiving);
  Result (*closeListen)(void* listening);
  Result (*getDeviceMr)(void* comm, void* registration, void** device);
  Result (*irecvConsumed)(void* receiving, int count, void* request);
  Result (*makeVDevice)(int* device, VirtualDevice* properties);
};

struct NetV10 {
  const char* name;
  Result (*init)(Logger logger, ProfilerCallback profiler);
  Result (*devices)(int* count);
  Result (*getProperties)(int device, PropertiesV10* properties);
  Result (*listen)(int device, void* handle, void** listening);
  Result (*connect)(int device, CommConfig* config, void* handle, void** sending, DeviceHandle** sendDevice);
  Transfer transfer;
};

struct NetV11 {
  const char* name;
  Result (*init)(void** context, uint64_t commId, CommConfig* config, Logger logger, ProfilerCallback profiler);
  Result (*devices)(int* count);
  Result (*getProperties)(int device, PropertiesV11* properties);
  Result (*listen)(void* context, int device, void* handle, void** listening);
  Result (*connect)(void* context, int device, void* handle, void** sending, DeviceHandle** sendDevice);
  Transfer transfer;
  Result (*finalize)(void* context);
  Result (*setNetAttr)(void* context, Attributes* attributes);
};

}  // namespace bagua::nccl_net
