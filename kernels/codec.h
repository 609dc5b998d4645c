// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/registry.h"

// Codecs: what tensors become before they travel. One is a folder of kernels/ that registers itself; the collectives
// of algorithms/shared/compressed/ find it by name.
namespace bagua {

// Elements [begin, end) of a chunk.
struct Piece {
  int64_t begin = 0;
  int64_t end = 0;

  bool operator==(const Piece&) const = default;
};

// How the elements of a chunk lie in its packed bytes: a header, then groups in ascending order, each of
// `groupElements` elements in `groupBytes` bytes, then zeros up to a multiple of `alignment`. The last group may hold
// fewer elements; it takes all of its bytes. The same for every dtype.
struct PackedLayout {
  int64_t headerBytes = 0;
  int64_t groupElements = 1;
  int64_t groupBytes = 1;
  int64_t alignment = 1;

  // Bytes of a packed chunk of `length` elements.
  [[nodiscard]] int64_t packedBytes(int64_t length) const;
  // The elements that have to be coded before bytes [beginByte, endByte) leave, when those before have left: of groups
  // that begin there.
  [[nodiscard]] Piece begunIn(int64_t beginByte, int64_t endByte, int64_t length) const;
  // The elements that can be decoded once bytes [beginByte, endByte) have come, when those before have been: of groups
  // that end there.
  [[nodiscard]] Piece endedIn(int64_t beginByte, int64_t endByte, int64_t length) const;
};

enum class Rounding {
  kNearest,
  // Up or down at random, with the value as the mean. The random numbers depend on Encoding::key and the element alone.
  kStochastic,
};

// How values are coded, beside the values. With feedback the codec codes h = values + residual and writes
// h - decoded(h) to nextResidual, in the same pass; decoded(h) is what decode() makes of it, in the type of the values.
// h and its rest are made in float32, or in float64 for values of float64; a rest that no float32 holds becomes the
// largest. Both residuals are contiguous float32 tensors with an element for every value, or both are undefined; they
// may be one tensor. Where h decodes to NaN the next residual is the residual.
struct Encoding {
  Rounding rounding = Rounding::kNearest;
  // Of whatever is drawn at random; the same for all pieces of a chunk. A codec whose decoder draws too sends it along.
  uint64_t key = 0;
  at::Tensor residual = {};
  at::Tensor nextResidual = {};
  // Undefined, or one bool beside the residuals: whether the step that wrote `residual` was lost. If so, what it has to
  // hold is in nextResidual still, and every element is first copied from there to `residual`, in the same pass. So the
  // CPU need not know what a device knows.
  at::Tensor wasLost = {};

  [[nodiscard]] bool hasFeedback() const { return residual.defined(); }
  // On the CPU: does that copy for the elements of a piece. Until the piece is coded, another call changes nothing.
  void restoreIfLost(const Piece& piece) const;
  // The same for elements [begin, begin + length) of the values, with a key of their own.
  [[nodiscard]] Encoding narrow(int64_t begin, int64_t length) const;
};

// A way to write a chunk, which is a flat tensor coded as a unit, into fewer bytes.
//
// `values` are contiguous, one-dimensional, float32, float64, float16 or bfloat16, on the CPU or on CUDA; `packed` is
// contiguous uint8 of layout().packedBytes() of as many elements, or longer; all tensors of a call are on one device.
// CUDA calls enqueue on the current stream, and never synchronise the CPU; there a piece is always the whole chunk,
// and `packed` may hold anything between start() and encode(). The caller has checked all that. Stateless: any thread
// may call.
//
// The contract, which tests/contract/codec_contract_test.cpp asks of every registered codec:
//  - The bytes are the same on every device, instruction set and number of threads, and for any cut into pieces. They
//    may depend on the type of the values, so that what was coded of one type is decoded to that type only.
//  - Every byte of `packed` is written; unused ones, and those behind packedBytes(), are zero. Decoding does not look
//    at these.
//  - Where a value of a group is NaN or infinite, all values of that group decode to NaN.
//  - Any bytes decode: a damaged packet falsifies values and reaches nothing outside of them.
//  - Finite values decode to finite ones, and zeros to zeros.
class Codec {
 public:
  virtual ~Codec() = default;

  [[nodiscard]] virtual PackedLayout layout() const = 0;

  // Whether Rounding::kStochastic may be asked for.
  [[nodiscard]] virtual bool canRoundStochastically() const { return false; }
  // Whether the bytes depend on Encoding::key.
  [[nodiscard]] virtual bool usesKey(Rounding rounding) const { return rounding == Rounding::kStochastic; }

  // Writes all of `packed` that encode() does not: the header, for which it may look at all values, and the zeros at
  // the end.
  virtual void start(const at::Tensor& values, const Encoding& encoding, at::Tensor& packed) const = 0;
  // The groups of a piece, of a chunk that was started. A piece begins where a group begins, and ends where one ends.
  // Pieces come in any order. With feedback each comes once: its residual may be the one that it writes. Values may be
  // read twice: nobody may change them meanwhile.
  virtual void encode(const at::Tensor& values, const Piece& piece, const Encoding& encoding,
                      at::Tensor& packed) const = 0;
  // `packed` holds the header and the groups of this piece at least; `values` are those of the whole chunk.
  virtual void decode(const at::Tensor& packed, const Piece& piece, at::Tensor& values) const = 0;
  // Adds what decode() would write into values of `dtype` to `sums`, which has the elements of the piece only. It is of
  // float64 where `dtype` is, and of float32 else. By default: decode() and an addition.
  virtual void decodeAdd(const at::Tensor& packed, const Piece& piece, at::ScalarType dtype, at::Tensor& sums) const;

  // What the owner of a chunk does with the copies that the ranks sent: writes the sum of the copies divided by
  // `divisor` into `mean`, whose type is that of the values, and makes `packed` ready for encode(mean, ...), as start()
  // would once all pieces are there. Pieces come in ascending order, from the chunk's begin to its end; before that a
  // codec may keep in the header of `packed` what it has seen. An empty piece changes nothing, unless the chunk is
  // empty. `copies` has a packed chunk in each row; rows are contiguous, and may be longer or further apart. The order
  // of the additions depends on the number of copies alone. By default: decodeAdd() block by block, in the order of the
  // rows.
  virtual void decodeMean(const at::Tensor& copies, const Piece& piece, double divisor, const Encoding& encoding,
                          at::Tensor& mean, at::Tensor& packed) const;
  // decodeMean() and encode() of the whole chunk, which a codec may do faster in one call.
  virtual void decodeMeanAndEncode(const at::Tensor& copies, double divisor, const Encoding& encoding, at::Tensor& mean,
                                   at::Tensor& packed) const;

  // Whole chunks, as a GPU likes them: `values` are cut into chunks of `chunkLength` elements, the last ones shorter or
  // empty, and row i of `packed` is chunk i. Rows are contiguous, and may be longer or further apart. By default,
  // start() and encode() or decode() for each chunk, with Encoding::narrow().
  virtual void encodeChunks(const at::Tensor& values, int64_t chunkLength, const Encoding& encoding,
                            at::Tensor& packed) const;
  virtual void decodeChunks(const at::Tensor& packed, int64_t chunkLength, at::Tensor& values) const;

 protected:
  // A decodeMean() ends with it: start(), once the piece that ends the chunk is there.
  void startIfComplete(const at::Tensor& mean, const Piece& piece, const Encoding& encoding, at::Tensor& packed) const;
};

struct CodecInfo {
  static constexpr const char* kKind = "codec";

  std::string name;
  std::string summary;
  // Where the name stands in listings. No two have the same; those without one follow, in the order of their names.
  int position = kNoPosition;
  std::shared_ptr<const Codec> codec;
  // The same codec as it is on each instruction set that this machine can run, for tests. May be empty.
  std::vector<std::shared_ptr<const Codec>> variants = {};
  // Where its tensors may be.
  std::vector<at::DeviceType> devices = {at::kCPU, at::kCUDA};

  [[nodiscard]] bool takes(at::DeviceType device) const;
  // Throws NotImplementedError for tensors of another device. `where` names the call, in the error.
  void checkDevice(at::Device device, const std::string& where) const;
  // Without the header.
  [[nodiscard]] double bitsPerElement() const;
};

// Filled by BAGUA_REGISTER_CODEC in each codec's folder.
using CodecRegistry = Registry<CodecInfo>;
template <>
std::map<std::string, CodecInfo>& CodecRegistry::entries();

}  // namespace bagua

// At namespace scope of a codec's .cpp file.
#define BAGUA_REGISTER_CODEC(...)                                  \
  namespace {                                                      \
  [[maybe_unused]] const bool BAGUA_OWN_NAME(kIsRegistered) =      \
      ::bagua::CodecRegistry::add(::bagua::CodecInfo __VA_ARGS__); \
  }
