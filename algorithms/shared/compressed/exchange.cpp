// SPDX-License-Identifier: Apache-2.0
#include "algorithms/shared/compressed/exchange.h"

#include <algorithm>
#include <utility>

#include "algorithms/shared/compressed/finite_groups.h"
#include "backend/os/scratch_memory.h"
#include "kernels/device_ways.h"

namespace bagua::compressed {
namespace {

int64_t lengthOf(const Piece& piece) { return piece.end - piece.begin; }

// Of the chunk of a lane: as Codec::encodeChunks() of the whole lane takes it, so that both draw the same.
Encoding narrowed(const Encoding& flat, const HostLanes& lanes, int lane, int host) {
  const Piece chunk = chunkOf(lanes, lane, host);
  return flat.narrow(lanes.begin(lane), lanes.length(lane)).narrow(chunk.begin - lanes.begin(lane), lengthOf(chunk));
}

}  // namespace

SectionCoder::SectionCoder(Section section, Slots slots, const Messages& messages, bool isToGather)
    : section_(std::move(section)),
      slots_(std::move(slots)),
      messages_(messages),
      codec_(*section_.coding.codec),
      layout_(codec_.layout()),
      ownHost_(section_.lanes.ownHost()),
      isWhole_(!worksOnCpu(section_.own)),
      isToGather_(isToGather),
      arranged_(slots_.endLane() - slots_.firstLane()) {
  int64_t begin = 0;
  for (int lane = slots_.firstLane(); lane < slots_.endLane(); ++lane) {
    own_.push_back(ownChunk(lane, begin));
    begin += own_.back().values.numel();
  }
}

SectionCoder::OwnChunk SectionCoder::ownChunk(int lane, int64_t begin) const {
  OwnChunk made;
  made.lane = lane;
  made.values = section_.own.narrow(0, begin, lengthOf(chunkOf(slots_.lanes(), lane, ownHost_)));
  made.encoding = ownEncoding(lane, begin);
  made.packed = slotIn(messages_.sent, lane, ownHost_);
  made.earliest = slots_.longestMessage();
  for (int host = 0; host < slots_.lanes().hostCount(); ++host) {
    if (host == ownHost_) continue;
    made.earliest = std::min(made.earliest, slots_.placeInMessage(lane, host));
    made.latest = std::max(made.latest, slots_.placeInMessage(lane, host));
  }
  return made;
}

Encoding SectionCoder::ownEncoding(int lane, int64_t begin) const {
  // The key is that of the place in the flat tensor, whatever this rank owns before it.
  Encoding encoding = section_.coding.owner;
  encoding.residual.reset();
  encoding.nextResidual.reset();
  encoding = narrowed(encoding, slots_.lanes(), lane, ownHost_);
  if (section_.coding.owner.hasFeedback()) {
    const int64_t length = lengthOf(chunkOf(slots_.lanes(), lane, ownHost_));
    encoding.residual = section_.coding.owner.residual.narrow(0, begin, length);
    encoding.nextResidual = section_.coding.owner.nextResidual.narrow(0, begin, length);
  }
  return encoding;
}

at::Tensor SectionCoder::newBytes(int64_t bytes) const { return scratchTensor({bytes}, messages_.sent.options()); }

at::Tensor SectionCoder::slotIn(const at::Tensor& messages, int lane, int host) const {
  return messages.narrow(0, slots_.place(lane, host), slots_.slotBytes());
}

at::Tensor SectionCoder::rowsIn(const at::Tensor& messages, int lane) const {
  const int hosts = slots_.lanes().hostCount();
  return messages.as_strided({hosts, slots_.slotBytes()}, {slots_.distance(lane), 1}, slots_.place(lane, 0));
}

SectionCoder::Range SectionCoder::within(int64_t begin, int64_t end, int64_t place) const {
  return {std::clamp<int64_t>(begin - place, 0, slots_.slotBytes()),
          std::clamp<int64_t>(end - place, 0, slots_.slotBytes())};
}

SectionCoder::Range SectionCoder::advance(int64_t& done, int64_t end, int64_t place) const {
  const int64_t begin = std::exchange(done, within(0, end, place).end);
  return {begin, done};
}

void SectionCoder::encode(const at::Tensor& values, const Encoding& encoding, at::Tensor& packed,
                          const Range& range) const {
  const int64_t length = values.numel();
  if (range.begin == 0) codec_.start(values, encoding, packed);
  const Piece piece = layout_.begunIn(range.begin, range.end, length);
  if (lengthOf(piece) > 0) codec_.encode(values, piece, encoding, packed);
}

void SectionCoder::decode(const at::Tensor& packed, const Range& range, at::Tensor values) {
  const Piece piece = layout_.endedIn(range.begin, range.end, values.numel());
  if (lengthOf(piece) == 0) return;
  codec_.decode(packed, piece, values);
  // Now, while a cache has them: whoever needs to know would else read all of them again.
  if (!isWhole_) isFinite_ = areGroupsFinite(values, piece, layout_.groupElements) && isFinite_;
}

// --- To the owners of chunks -----------------------------------------------------------------------------------------

void SectionCoder::encodeLanes(int64_t begin, int64_t end) {
  for (int lane = slots_.firstLane(); lane < slots_.endLane(); ++lane) encodeLane(lane, begin, end);
}

void SectionCoder::reduceLanes(double divisor, int64_t end) {
  for (auto& own : own_) reduceLane(divisor, own, end);
}

Encoding SectionCoder::senderEncoding(int lane, int host) const {
  return narrowed(section_.coding.sender, slots_.lanes(), lane, host);
}

void SectionCoder::encodeLane(int lane, int64_t begin, int64_t end) {
  if (isWhole_ && slots_.distance(lane) > 0) {
    const Piece all{slots_.lanes().begin(lane), slots_.lanes().begin(lane + 1)};
    at::Tensor rows = rowsIn(messages_.sent, lane);
    const Encoding encoding = section_.coding.sender.narrow(all.begin, lengthOf(all));
    return codec_.encodeChunks(elementsOf(section_.flat, all), chunkLength(slots_.lanes()), encoding, rows);
  }
  for (int host = 0; host < slots_.lanes().hostCount(); ++host) {
    // Our own copy is coded when the line is busy, see reduceLane().
    if (host == ownHost_ && !isWhole_) continue;
    const Range range = within(begin, end, slots_.placeInMessage(lane, host));
    if (range.begin == range.end) continue;
    at::Tensor packed = slotIn(messages_.sent, lane, host);
    encode(elementsOf(section_.flat, chunkOf(slots_.lanes(), lane, host)), senderEncoding(lane, host), packed, range);
  }
}

void SectionCoder::reduceLane(double divisor, OwnChunk& own, int64_t end) {
  const Range range = advance(own.reduced, end, own.latest);
  if (range.begin == range.end) return;
  const at::Tensor copies = copiesOf(own, range);
  if (!isWhole_) {
    at::Tensor packed = copies[ownHost_];
    const Piece chunk = chunkOf(slots_.lanes(), own.lane, ownHost_);
    encode(elementsOf(section_.flat, chunk), senderEncoding(own.lane, ownHost_), packed, range);
  } else if (isToGather_) {
    return codec_.decodeMeanAndEncode(copies, divisor, own.encoding, own.values, own.packed);
  }
  const Piece piece = layout_.endedIn(range.begin, range.end, own.values.numel());
  const bool isEmptyChunk = own.values.numel() == 0 && range.begin == 0;
  if (lengthOf(piece) > 0 || isEmptyChunk) {
    codec_.decodeMean(copies, piece, divisor, own.encoding, own.values, own.packed);
  }
}

at::Tensor SectionCoder::copiesOf(const OwnChunk& own, const Range& range) {
  if (slots_.distance(own.lane) > 0) return rowsIn(messages_.received, own.lane);
  at::Tensor& arranged = arranged_[own.lane - slots_.firstLane()];
  const int hosts = slots_.lanes().hostCount();
  if (!arranged.defined()) arranged = newBytes(hosts * slots_.slotBytes()).view({hosts, slots_.slotBytes()});
  const int64_t length = range.end - range.begin;
  for (int host = 0; host < hosts; ++host) {
    if (host == ownHost_ && !isWhole_) continue;
    arranged[host]
        .narrow(0, range.begin, length)
        .copy_(slotIn(messages_.received, own.lane, host).narrow(0, range.begin, length));
  }
  return arranged;
}

// --- From the owners of chunks ---------------------------------------------------------------------------------------

void SectionCoder::encodeOwn(bool isReduced, int64_t end) {
  for (auto& own : own_) encodeOwn(own, isReduced, end);
}

void SectionCoder::decodeLanes(int64_t begin, int64_t end) {
  for (auto& own : own_) decodeLane(own, begin, end);
}

void SectionCoder::encodeOwn(OwnChunk& own, bool isReduced, int64_t end) {
  const Range range = advance(own.encoded, end, own.earliest);
  if (range.begin == range.end) return;
  if (!isReduced) {
    encode(own.values, own.encoding, own.packed, range);
  } else if (!isWhole_) {
    const Piece piece = layout_.begunIn(range.begin, range.end, own.values.numel());
    if (lengthOf(piece) > 0) codec_.encode(own.values, piece, own.encoding, own.packed);
  }
  // A message to all is sent from where it lies.
  if (slots_.lanes().hostCount() == slots_.participants()) return;
  const at::Tensor coded = own.packed.narrow(0, range.begin, range.end - range.begin);
  for (int host = 0; host < slots_.lanes().hostCount(); ++host) {
    if (host == ownHost_) continue;
    slotIn(messages_.sent, own.lane, host).narrow(0, range.begin, range.end - range.begin).copy_(coded);
  }
}

void SectionCoder::decodeLane(OwnChunk& own, int64_t begin, int64_t end) {
  if (isWhole_ && slots_.distance(own.lane) > 0) {
    at::Tensor values = section_.flat.narrow(0, slots_.lanes().begin(own.lane), slots_.lanes().length(own.lane));
    return codec_.decodeChunks(rowsIn(messages_.received, own.lane), chunkLength(slots_.lanes()), values);
  }
  for (int host = 0; host < slots_.lanes().hostCount(); ++host) {
    const at::Tensor values = elementsOf(section_.flat, chunkOf(slots_.lanes(), own.lane, host));
    if (host == ownHost_ && !isWhole_) {
      decode(own.packed, advance(own.decoded, end, own.earliest), values);
    } else {
      const Range range = within(begin, end, slots_.placeInMessage(own.lane, host));
      decode(slotIn(messages_.received, own.lane, host), range, values);
    }
  }
}

// --- Messages --------------------------------------------------------------------------------------------------------

Exchange::Exchange(const std::vector<Section>& sections, bool isToGather, StageSeconds& seconds,
                   Communicator& communicator)
    : seconds_(seconds),
      communicator_(communicator),
      isWhole_(!worksOnCpu(sections.front().own)),
      isToAll_(sections.front().lanes.hostCount() == communicator.size()) {
  std::vector<int64_t> slotBytes;
  for (const auto& [flat, own, lanes, coding] : sections) {
    slotBytes.push_back(coding.codec->layout().packedBytes(chunkLength(lanes)));
    unitBytes_ += slotBytes.back();
  }
  int64_t offset = 0;
  for (size_t i = 0; i < sections.size(); ++i) {
    Slots slots(sections[i].lanes, communicator.rank(), communicator.size(), slotBytes[i], offset, unitBytes_);
    offset += slotBytes[i];
    if (i == 0) {
      splits_ = slots.splits();
      longestMessage_ = slots.longestMessage();
      const auto options = sections[i].own.options().dtype(at::kByte);
      messages_ = {scratchTensor({slots.totalBytes()}, options), scratchTensor({slots.totalBytes()}, options)};
    }
    coders_.emplace_back(sections[i], std::move(slots), messages_, isToGather);
  }
}

void Exchange::exchangeMessages(const Pipeline& pipeline) {
  if (!isWhole_) {
    return communicator_.allToAllInPieces(messages_.received, messages_.sent, splits_, splits_, pipeline);
  }
  pipeline.beforeSending(0, longestMessage_);
  communicator_.allToAll(messages_.received, messages_.sent, splits_, splits_);
  pipeline.afterReceiving(0, longestMessage_);
}

void Exchange::reduce(double divisor) {
  const auto encodeAll = [&](int64_t begin, int64_t end) {
    const Stage stage(seconds_, stages::kCompress);
    for (auto& coder : coders_) coder.encodeLanes(begin, end);
  };
  const auto reduceAll = [&](int64_t /*begin*/, int64_t end) {
    const Stage stage(seconds_, stages::kReduce);
    for (auto& coder : coders_) coder.reduceLanes(divisor, end);
  };
  const Elapsed exchange(seconds_, stages::kExchange, {stages::kCompress, stages::kReduce});
  exchangeMessages({.beforeSending = encodeAll, .afterReceiving = reduceAll});
  isReduced_ = true;
}

std::optional<bool> Exchange::isFinite() const {
  std::optional<bool> areAll = true;
  for (const auto& coder : coders_) {
    const auto isFinite = coder.isFinite();
    if (!isFinite) return std::nullopt;
    areAll = *areAll && *isFinite;
  }
  return areAll;
}

std::optional<bool> Exchange::gather() {
  const auto encodeAll = [&](int64_t /*begin*/, int64_t end) {
    const Stage stage(seconds_, stages::kReduce);
    for (auto& coder : coders_) coder.encodeOwn(isReduced_, end);
  };
  const auto decodeAll = [&](int64_t begin, int64_t end) {
    const Stage stage(seconds_, stages::kDecompress);
    for (auto& coder : coders_) coder.decodeLanes(begin, end);
  };
  const Elapsed gather(seconds_, stages::kGather, {stages::kReduce, stages::kDecompress});
  const Pipeline pipeline{.beforeSending = encodeAll, .afterReceiving = decodeAll};
  isToAll_ ? allGatherResults(pipeline) : exchangeMessages(pipeline);
  return isFinite();
}

// Every rank has one lane and one unit: what it sends is that of its own chunks.
void Exchange::allGatherResults(const Pipeline& pipeline) {
  const at::Tensor own = messages_.sent.narrow(0, communicator_.rank() * unitBytes_, unitBytes_);
  if (!isWhole_) return communicator_.allGatherInPieces(messages_.received, own, pipeline);
  pipeline.beforeSending(0, unitBytes_);
  communicator_.allGather(messages_.received, own);
  pipeline.afterReceiving(0, unitBytes_);
}

}  // namespace bagua::compressed
