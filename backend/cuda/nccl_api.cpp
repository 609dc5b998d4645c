// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/nccl_api.h"

namespace bagua {

NcclApi& NcclApi::library() {
  static NcclApi api;
  return api;
}

ncclResult_t NcclApi::getUniqueId(ncclUniqueId* id) { return ncclGetUniqueId(id); }

ncclResult_t NcclApi::commInitRankConfig(ncclComm_t* comm, int size, const ncclUniqueId& id, int rank,
                                         ncclConfig_t* config) {
  return ncclCommInitRankConfig(comm, size, id, rank, config);
}

ncclResult_t NcclApi::commSplit(ncclComm_t parent, int color, int key, ncclComm_t* comm, ncclConfig_t* config) {
  return ncclCommSplit(parent, color, key, comm, config);
}

ncclResult_t NcclApi::commGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  return ncclCommGetAsyncError(comm, state);
}

ncclResult_t NcclApi::commAbort(ncclComm_t comm) { return ncclCommAbort(comm); }

ncclResult_t NcclApi::commFinalize(ncclComm_t comm) { return ncclCommFinalize(comm); }

ncclResult_t NcclApi::commDestroy(ncclComm_t comm) { return ncclCommDestroy(comm); }

ncclResult_t NcclApi::groupStart() { return ncclGroupStart(); }

ncclResult_t NcclApi::groupEnd() { return ncclGroupEnd(); }

ncclResult_t NcclApi::broadcast(const void* input, void* output, size_t count, ncclDataType_t dtype, int root,
                                ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(input, output, count, dtype, root, comm, stream);
}

ncclResult_t NcclApi::allReduce(const void* input, void* output, size_t count, ncclDataType_t dtype, ncclRedOp_t op,
                                ncclComm_t comm, cudaStream_t stream) {
  return ncclAllReduce(input, output, count, dtype, op, comm, stream);
}

ncclResult_t NcclApi::reduce(const void* input, void* output, size_t count, ncclDataType_t dtype, ncclRedOp_t op,
                             int root, ncclComm_t comm, cudaStream_t stream) {
  return ncclReduce(input, output, count, dtype, op, root, comm, stream);
}

ncclResult_t NcclApi::allGather(const void* input, void* output, size_t inputCount, ncclDataType_t dtype,
                                ncclComm_t comm, cudaStream_t stream) {
  return ncclAllGather(input, output, inputCount, dtype, comm, stream);
}

ncclResult_t NcclApi::reduceScatter(const void* input, void* output, size_t outputCount, ncclDataType_t dtype,
                                    ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return ncclReduceScatter(input, output, outputCount, dtype, op, comm, stream);
}

ncclResult_t NcclApi::send(const void* input, size_t count, ncclDataType_t dtype, int peer, ncclComm_t comm,
                           cudaStream_t stream) {
  return ncclSend(input, count, dtype, peer, comm, stream);
}

ncclResult_t NcclApi::receive(void* output, size_t count, ncclDataType_t dtype, int peer, ncclComm_t comm,
                              cudaStream_t stream) {
  return ncclRecv(output, count, dtype, peer, comm, stream);
}

ncclResult_t NcclApi::redOpCreatePreMulSum(ncclRedOp_t* op, void* factor, ncclDataType_t dtype,
                                           ncclScalarResidence_t residence, ncclComm_t comm) {
  return ncclRedOpCreatePreMulSum(op, factor, dtype, residence, comm);
}

ncclResult_t NcclApi::redOpDestroy(ncclRedOp_t op, ncclComm_t comm) { return ncclRedOpDestroy(op, comm); }

std::string NcclApi::describe(ncclResult_t result, ncclComm_t comm) {
  std::string text = ncclGetErrorString(result);
  const char* last = ncclGetLastError(comm);
  if (last != nullptr && *last != '\0') text.append("; NCCL's last message: ").append(last);
  return text;
}

}  // namespace bagua
