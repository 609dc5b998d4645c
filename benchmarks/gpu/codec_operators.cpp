// SPDX-License-Identifier: Apache-2.0
// torch.ops.codec_operators: every codec by its name, on tensors of one process, without a group. codec.py measures
// them and tests/gpu compares them; the package itself has no use for them.
#include <torch/library.h>

#include <optional>
#include <string>

#include "kernels/codec.h"

namespace bagua {
namespace {

const Codec& codecOf(const std::string& name) { return *CodecRegistry::find(name).codec; }

int64_t chunkLength(int64_t elements, int64_t chunks) { return (elements + chunks - 1) / chunks; }

// Of a chunk of so many elements.
int64_t packedBytes(const std::string& codec, int64_t elements) {
  return codecOf(codec).layout().packedBytes(elements);
}

// One row of packed bytes for each chunk. With a residual it is added, and replaced by what coding leaves.
void encode(const std::string& codec, const at::Tensor& values, const std::optional<at::Tensor>& residual,
            at::Tensor packed) {
  const Encoding encoding = residual ? Encoding{.residual = *residual, .nextResidual = *residual} : Encoding{};
  codecOf(codec).encodeChunks(values, chunkLength(values.numel(), packed.size(0)), encoding, packed);
}

void decode(const std::string& codec, const at::Tensor& packed, at::Tensor values) {
  codecOf(codec).decodeChunks(packed, chunkLength(values.numel(), packed.size(0)), values);
}

// The mean of the rows, coded again: what the owner of a part does with what has come.
void decodeMeanAndEncode(const std::string& codec, const at::Tensor& rows, at::Tensor mean, at::Tensor packed) {
  codecOf(codec).decodeMeanAndEncode(rows, static_cast<double>(rows.size(0)), Encoding{}, mean, packed);
}

}  // namespace
}  // namespace bagua

TORCH_LIBRARY(codec_operators, m) {
  m.def("packed_bytes(str codec, int elements) -> int", bagua::packedBytes);
  m.def("encode(str codec, Tensor values, Tensor(a!)? residual, Tensor(b!) packed) -> ()", bagua::encode);
  m.def("decode(str codec, Tensor packed, Tensor(a!) values) -> ()", bagua::decode);
  m.def("mean(str codec, Tensor rows, Tensor(a!) mean, Tensor(b!) packed) -> ()", bagua::decodeMeanAndEncode);
}
