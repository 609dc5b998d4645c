// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "algorithms/shared/compressed/coding.h"
#include "algorithms/shared/compressed/slots.h"
#include "algorithms/stage.h"

namespace bagua::compressed {

// A flat tensor that takes part in an exchange.
struct Section {
  // Its values, and where the result goes.
  at::Tensor flat;
  // The reduced values of this rank's chunks, lane after lane.
  at::Tensor own;
  // Of the same topology for all sections of an exchange; has to outlive it, like the coding.
  const HostLanes& lanes;
  const Coding& coding;
};

// What is done to one section: coded into its places in the messages, and decoded from its places in those that came.
// Bytes [begin, end) of every message go through each step together, see Pipeline; a slot that does not begin with its
// message is that much behind.
class SectionCoder {
 public:
  struct Messages {
    // Both ways take the same memory. The slots of a rank's own chunks, which do not travel to it, hold its results.
    at::Tensor sent;
    at::Tensor received;
  };

  // `isToGather`: whether gathering will follow a reduction.
  SectionCoder(Section section, Slots slots, const Messages& messages, bool isToGather);

  // On the way to the owners of chunks.
  void encodeLanes(int64_t begin, int64_t end);
  void reduceLanes(double divisor, int64_t end);
  // On the way from them; `isReduced`: whether `own` was made by reduceLanes().
  void encodeOwn(bool isReduced, int64_t end);
  void decodeLanes(int64_t begin, int64_t end);
  // Of all that decodeLanes() has decoded; on CUDA it is not known.
  [[nodiscard]] std::optional<bool> isFinite() const { return isWhole_ ? std::nullopt : std::optional(isFinite_); }

 private:
  // The chunk of a lane that this rank owns. The counts are of bytes of its slot.
  struct OwnChunk {
    int lane = 0;
    at::Tensor values;
    Encoding encoding;
    at::Tensor packed;
    // Where the first and the last of the other hosts' slots begin, in their messages.
    int64_t earliest = 0;
    int64_t latest = 0;
    int64_t reduced = 0;
    int64_t encoded = 0;
    int64_t decoded = 0;
  };
  // Bytes of a slot.
  struct Range {
    int64_t begin = 0;
    int64_t end = 0;
  };

  [[nodiscard]] OwnChunk ownChunk(int lane, int64_t begin) const;
  // Of the values in `own` from element `begin` on.
  [[nodiscard]] Encoding ownEncoding(int lane, int64_t begin) const;
  [[nodiscard]] at::Tensor newBytes(int64_t bytes) const;
  [[nodiscard]] at::Tensor slotIn(const at::Tensor& messages, int lane, int host) const;
  // All slots of a lane, a row each, where they lie in order.
  [[nodiscard]] at::Tensor rowsIn(const at::Tensor& messages, int lane) const;
  // Of a slot that begins at `place` of its message, what lies in bytes [begin, end) of that.
  [[nodiscard]] Range within(int64_t begin, int64_t end, int64_t place) const;
  // The bytes from `done`, which becomes their end, up to byte `end` of a message.
  Range advance(int64_t& done, int64_t end, int64_t place) const;

  void encodeLane(int lane, int64_t begin, int64_t end);
  // What bytes `range` of a slot hold, of a chunk whose values and packed bytes these are.
  void encode(const at::Tensor& values, const Encoding& encoding, at::Tensor& packed, const Range& range) const;
  void decode(const at::Tensor& packed, const Range& range, at::Tensor values);
  [[nodiscard]] Encoding senderEncoding(int lane, int host) const;
  void reduceLane(double divisor, OwnChunk& own, int64_t end);
  // A row for each host; of the bytes of a slot only `range` counts.
  [[nodiscard]] at::Tensor copiesOf(const OwnChunk& own, const Range& range);
  void encodeOwn(OwnChunk& own, bool isReduced, int64_t end);
  void decodeLane(OwnChunk& own, int64_t begin, int64_t end);

  const Section section_;
  const Slots slots_;
  const Messages messages_;
  const Codec& codec_;
  const PackedLayout layout_;
  const int ownHost_;
  // On CUDA: all slots of a lane in one call, this rank's among them.
  const bool isWhole_;
  const bool isToGather_;
  // Of lanes whose slots do not lie in order, by lane.
  std::vector<at::Tensor> arranged_;
  std::vector<OwnChunk> own_;
  bool isFinite_ = true;
};

// One exchange between the owners of lanes, of one section or several: they travel in the same messages. reduce(),
// gather() or both, in this order and once each.
class Exchange {
 public:
  // `isToGather`: whether gather() will follow reduce().
  Exchange(const std::vector<Section>& sections, bool isToGather, StageSeconds& seconds, Communicator& communicator);

  // Fills `own` of the sections.
  void reduce(double divisor);
  // Tells the other hosts what is in `own`; fills `flat`. Whether all that it has written there is finite; nothing on
  // CUDA, where only the device knows.
  std::optional<bool> gather();

 private:
  // Slots for slots: each message to its rank.
  void exchangeMessages(const Pipeline& pipeline);
  void allGatherResults(const Pipeline& pipeline);
  [[nodiscard]] std::optional<bool> isFinite() const;

  StageSeconds& seconds_;
  Communicator& communicator_;
  const bool isWhole_;
  // Whether a message from this rank is the same for all.
  const bool isToAll_;
  bool isReduced_ = false;
  Communicator::Splits splits_;
  int64_t longestMessage_ = 0;
  int64_t unitBytes_ = 0;
  SectionCoder::Messages messages_;
  std::vector<SectionCoder> coders_;
};

}  // namespace bagua::compressed
