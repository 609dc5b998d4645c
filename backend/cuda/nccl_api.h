// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nccl.h>

#include <string>

namespace bagua {

// Every NCCL call that bagua makes. Virtual for one reason: a mock takes its place where there is no GPU. Stateless;
// NCCL's own rules say which calls may run at the same time.
class NcclApi {
 public:
  virtual ~NcclApi() = default;

  // The library that torch has loaded.
  static NcclApi& library();

  [[nodiscard]] virtual ncclResult_t getUniqueId(ncclUniqueId* id);
  [[nodiscard]] virtual ncclResult_t commInitRankConfig(ncclComm_t* comm, int size, const ncclUniqueId& id, int rank,
                                                        ncclConfig_t* config);
  [[nodiscard]] virtual ncclResult_t commSplit(ncclComm_t parent, int color, int key, ncclComm_t* comm,
                                               ncclConfig_t* config);
  [[nodiscard]] virtual ncclResult_t commGetAsyncError(ncclComm_t comm, ncclResult_t* state);
  [[nodiscard]] virtual ncclResult_t commAbort(ncclComm_t comm);
  [[nodiscard]] virtual ncclResult_t commFinalize(ncclComm_t comm);
  [[nodiscard]] virtual ncclResult_t commDestroy(ncclComm_t comm);

  [[nodiscard]] virtual ncclResult_t groupStart();
  [[nodiscard]] virtual ncclResult_t groupEnd();

  [[nodiscard]] virtual ncclResult_t broadcast(const void* input, void* output, size_t count, ncclDataType_t dtype,
                                               int root, ncclComm_t comm, cudaStream_t stream);
  [[nodiscard]] virtual ncclResult_t allReduce(const void* input, void* output, size_t count, ncclDataType_t dtype,
                                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
  [[nodiscard]] virtual ncclResult_t reduce(const void* input, void* output, size_t count, ncclDataType_t dtype,
                                            ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream);
  [[nodiscard]] virtual ncclResult_t allGather(const void* input, void* output, size_t inputCount, ncclDataType_t dtype,
                                               ncclComm_t comm, cudaStream_t stream);
  [[nodiscard]] virtual ncclResult_t reduceScatter(const void* input, void* output, size_t outputCount,
                                                   ncclDataType_t dtype, ncclRedOp_t op, ncclComm_t comm,
                                                   cudaStream_t stream);
  [[nodiscard]] virtual ncclResult_t send(const void* input, size_t count, ncclDataType_t dtype, int peer,
                                          ncclComm_t comm, cudaStream_t stream);
  [[nodiscard]] virtual ncclResult_t receive(void* output, size_t count, ncclDataType_t dtype, int peer,
                                             ncclComm_t comm, cudaStream_t stream);

  [[nodiscard]] virtual ncclResult_t redOpCreatePreMulSum(ncclRedOp_t* op, void* factor, ncclDataType_t dtype,
                                                          ncclScalarResidence_t residence, ncclComm_t comm);
  [[nodiscard]] virtual ncclResult_t redOpDestroy(ncclRedOp_t op, ncclComm_t comm);

  // `comm` may be null.
  [[nodiscard]] virtual std::string describe(ncclResult_t result, ncclComm_t comm);
};

}  // namespace bagua
