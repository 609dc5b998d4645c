// SPDX-License-Identifier: Apache-2.0
#include "algorithms/bytegrad/compressed_exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "kernels/minmax_uint8/minmax_uint8.h"
#include "kernels/minmax_uint8/minmax_uint8_pieces.h"

namespace bagua::bytegrad {
namespace {

using Splits = Communicator::Splits;

// The packed chunks that this rank exchanges with the owners of its lanes. Every (lane, host) pair is a slot; messages
// to one rank are its slots in ascending order of lanes. Lanes are of equal stride, so slots are of equal size.
class SlotMap {
 public:
  SlotMap(const HostLanes& lanes, int rank, int size)
      : lanes_(lanes), first_(lanes.firstLane(rank)), end_(lanes.endLane(rank)), counts_(size, 0), begins_(size, 0) {
    for (int lane = first_; lane < end_; ++lane) {
      for (int host = 0; host < lanes.hostCount(); ++host) ++counts_[lanes.owner(host, lane)];
    }
    std::exclusive_scan(counts_.begin(), counts_.end(), begins_.begin(), int64_t{0});
  }

  [[nodiscard]] int firstLane() const { return first_; }
  [[nodiscard]] int endLane() const { return end_; }
  [[nodiscard]] int64_t slots() const { return static_cast<int64_t>(end_ - first_) * lanes_.hostCount(); }

  [[nodiscard]] Splits splits(int64_t slotBytes) const {
    Splits bytes(counts_);
    for (auto& count : bytes) count *= slotBytes;
    return bytes;
  }

  // Position, in the order of messages, of what is exchanged about `lane` with its owner on `host`.
  [[nodiscard]] int64_t position(int lane, int host) const {
    const int peer = lanes_.owner(host, lane);
    int64_t position = begins_[peer];
    for (int other = first_; other < lane; ++other) position += lanes_.owner(host, other) == peer ? 1 : 0;
    return position;
  }

 private:
  const HostLanes& lanes_;
  const int first_;
  const int end_;
  Splits counts_;
  // Where the slots of each rank begin.
  Splits begins_;
};

// `slots` is arranged by (lane, host), messages by position. Where the two orders agree nothing is copied.
at::Tensor reorder(const at::Tensor& slots, const SlotMap& map, int hosts, bool toMessages) {
  std::vector<int64_t> positions;
  bool isIdentity = true;
  for (int lane = map.firstLane(); lane < map.endLane(); ++lane) {
    for (int host = 0; host < hosts; ++host) {
      positions.push_back(map.position(lane, host));
      isIdentity = isIdentity && positions.back() == static_cast<int64_t>(positions.size()) - 1;
    }
  }
  if (isIdentity) return slots;
  at::Tensor arranged = at::empty_like(slots);
  for (size_t slot = 0; slot < positions.size(); ++slot) {
    const auto index = static_cast<int64_t>(slot);
    if (toMessages) {
      arranged[positions[slot]].copy_(slots[index]);
    } else {
      arranged[index].copy_(slots[positions[slot]]);
    }
  }
  return arranged;
}

// One exchange: the geometry that its steps share.
class Exchange {
 public:
  Exchange(at::Tensor& flat, const HostLanes& lanes, Communicator& communicator)
      : flat_(flat),
        lanes_(lanes),
        communicator_(communicator),
        map_(lanes, communicator.rank(), communicator.size()),
        hosts_(lanes.hostCount()),
        // The first lane is the longest; all use its chunks, so that all slots are of one size.
        chunkLength_(minmax_uint8::chunkLength(lanes.length(0), hosts_)),
        slotBytes_(minmax_uint8::packedChunkBytes(chunkLength_)) {}

  // A packed chunk per (lane, host).
  [[nodiscard]] at::Tensor compressLanes() const {
    at::Tensor slots = newSlots(map_.slots());
    forEachLane([&](int lane, int64_t row) {
      const at::Tensor values = flat_.narrow(0, lanes_.begin(lane), lanes_.length(lane));
      if (isWhole(lane)) {
        at::Tensor packed = slots.narrow(0, row, hosts_).view({-1});
        minmax_uint8::compress(values, hosts_, packed);
        return;
      }
      slots.narrow(0, row, hosts_).zero_();  // what a short chunk leaves of its slot travels too
      for (int host = 0; host < hosts_; ++host) {
        at::Tensor packed = packedChunk(slots, row + host, lane, host);
        minmax_uint8::compress(chunk(values, host), 1, packed);
      }
    });
    return slots;
  }

  // `slots` holds what the hosts sent about our chunk of each lane. Returns the reduced chunk, a row per lane.
  [[nodiscard]] at::Tensor reduceChunks(const at::Tensor& slots, float divisor) const {
    at::Tensor reduced = newSlots(map_.endLane() - map_.firstLane());
    forEachLane([&](int lane, int64_t row) {
      at::Tensor packed = reduced[row / hosts_];
      minmax_uint8::reduceAndCompress(slots.narrow(0, row, hosts_).view({-1}), hosts_,
                                      chunkLengthOf(lane, lanes_.ownHost()), chunkLength_, flat_.scalar_type(), divisor,
                                      packed);
    });
    return reduced;
  }

  void decompressLanes(const at::Tensor& slots) const {
    forEachLane([&](int lane, int64_t row) {
      at::Tensor values = flat_.narrow(0, lanes_.begin(lane), lanes_.length(lane));
      if (isWhole(lane)) {
        minmax_uint8::decompress(slots.narrow(0, row, hosts_).view({-1}), hosts_, values);
        return;
      }
      for (int host = 0; host < hosts_; ++host) {
        at::Tensor part = chunk(values, host);
        minmax_uint8::decompress(packedChunk(slots, row + host, lane, host), 1, part);
      }
    });
  }

  // Slot (lane, host) goes to the owner of the lane on that host; what comes back is arranged likewise.
  [[nodiscard]] at::Tensor swap(const at::Tensor& slots) const {
    const at::Tensor sent = reorder(slots, map_, hosts_, true);
    at::Tensor received = newSlots(map_.slots());
    communicator_.allToAll(received, sent, map_.splits(slotBytes_), map_.splits(slotBytes_));
    return reorder(received, map_, hosts_, false);
  }

  // Every owner's reduced chunk, to all owners of the lane.
  [[nodiscard]] at::Tensor spread(const at::Tensor& reduced) const {
    if (hosts_ == communicator_.size()) {
      at::Tensor gathered = newSlots(hosts_);
      communicator_.allGather(gathered, reduced);
      return reorder(gathered, map_, hosts_, false);
    }
    return swap(reduced.repeat_interleave(hosts_, 0));
  }

 private:
  [[nodiscard]] at::Tensor newSlots(int64_t rows) const {
    return at::empty({rows, slotBytes_}, flat_.options().dtype(at::kByte));
  }

  template <typename Visit>
  void forEachLane(Visit&& visit) const {
    for (int lane = map_.firstLane(); lane < map_.endLane(); ++lane) {
      visit(lane, static_cast<int64_t>(lane - map_.firstLane()) * hosts_);
    }
  }

  // Whether the codec, left to cut the lane by itself, makes chunks of our length.
  [[nodiscard]] bool isWhole(int lane) const {
    return minmax_uint8::chunkLength(lanes_.length(lane), hosts_) == chunkLength_;
  }

  [[nodiscard]] int64_t chunkLengthOf(int lane, int host) const {
    return std::clamp<int64_t>(lanes_.length(lane) - host * chunkLength_, 0, chunkLength_);
  }

  [[nodiscard]] at::Tensor chunk(const at::Tensor& values, int host) const {
    const int64_t begin = std::min(host * chunkLength_, values.numel());
    return values.narrow(0, begin, std::min(chunkLength_, values.numel() - begin));
  }

  [[nodiscard]] at::Tensor packedChunk(const at::Tensor& slots, int64_t row, int lane, int host) const {
    return slots[row].narrow(0, 0, minmax_uint8::packedBytes(chunkLengthOf(lane, host), 1));
  }

  at::Tensor& flat_;
  const HostLanes& lanes_;
  Communicator& communicator_;
  const SlotMap map_;
  const int hosts_;
  const int64_t chunkLength_;
  const int64_t slotBytes_;
};

// The same on CPU tensors, with a single lane: codes of one piece while others are on their way.
class PipelinedExchange {
 public:
  PipelinedExchange(at::Tensor& flat, const HostLanes& lanes, StageSeconds& seconds, Communicator& communicator)
      : values_(flat.narrow(0, lanes.begin(lanes.firstLane(communicator.rank())),
                            lanes.length(lanes.firstLane(communicator.rank())))),
        lanes_(lanes),
        seconds_(seconds),
        communicator_(communicator),
        map_(lanes, communicator.rank(), communicator.size()),
        hosts_(lanes.hostCount()),
        chunkLength_(minmax_uint8::chunkLength(lanes.length(0), hosts_)),
        slotBytes_(minmax_uint8::packedChunkBytes(chunkLength_)) {}

  // The same on every rank: each owns one lane, and messages to the owners are in the order of their hosts.
  static bool isPossible(const at::Tensor& flat, const HostLanes& lanes) {
    if (!flat.is_cpu() || !flat.is_contiguous() || !lanes.isEven()) return false;
    for (int lane = 0; lane < lanes.count(); ++lane) {
      const auto owners = lanes.owners(lane);
      if (!std::is_sorted(owners.begin(), owners.end())) return false;
    }
    return true;
  }

  // The sum of all copies of our chunk, divided.
  struct Sum {
    at::Tensor values;
    minmax_uint8::Range<double> range = minmax_uint8::emptyRange<double>();
  };

  [[nodiscard]] Sum reduce(float divisor) {
    const int ownHost = lanes_.ownHost();
    at::Tensor sent = newSlots();
    const auto forEachOther = [&](const auto& visit) {
      for (int host = 0; host < hosts_; ++host) {
        at::Tensor slot = sent[host];
        if (host != ownHost) visit(chunk(host), slot);
      }
    };
    {
      const Stage stage(seconds_, "compress");
      forEachOther([](const at::Tensor& values, at::Tensor& slot) { minmax_uint8::startChunk(values, slot); });
    }
    const auto compress = [&](int64_t begin, int64_t end) {
      const Stage stage(seconds_, "compress");
      forEachOther([&](const at::Tensor& values, at::Tensor& slot) {
        minmax_uint8::compressPiece(values, pieceOf(begin, end, values), slot);
      });
    };
    const at::Tensor own = chunk(ownHost);
    at::Tensor received = newSlots();
    at::Tensor ownSlot = received[ownHost];
    Sum sum{.values = at::empty_like(own)};
    // Our own copy is coded only here, when the line is busy.
    const auto add = [&](int64_t begin, int64_t end) {
      const Stage stage(seconds_, "reduce");
      const auto piece = pieceOf(begin, end, own);
      if (begin == 0) minmax_uint8::startChunk(own, ownSlot);
      minmax_uint8::compressPiece(own, piece, ownSlot);
      const auto range = minmax_uint8::reducePiece(received.view({-1}), hosts_, piece, divisor, sum.values);
      sum.range = minmax_uint8::merge(sum.range, range);
    };
    const Elapsed exchange(seconds_, "exchange", {"compress", "reduce"});
    at::Tensor receivedBytes = received.view({-1});
    communicator_.allToAllInPieces(receivedBytes, sent.view({-1}), map_.splits(slotBytes_), map_.splits(slotBytes_),
                                   {.beforeSending = compress, .afterReceiving = add});
    return sum;
  }

  // The owners of all chunks tell each other what has become of them.
  void spread(const Sum& sum) {
    const bool isToAll = hosts_ == communicator_.size();
    at::Tensor sent = at::empty({isToAll ? 1 : hosts_, slotBytes_}, values_.options().dtype(at::kByte));
    at::Tensor own = sent[0];
    {
      const Stage stage(seconds_, "reduce");
      minmax_uint8::startChunk(sum.values, sum.range, own);
    }
    const auto compress = [&](int64_t begin, int64_t end) {
      const Stage stage(seconds_, "reduce");
      minmax_uint8::compressPiece(sum.values, pieceOf(begin, end, sum.values), own);
      for (int64_t copy = 1; copy < sent.size(0); ++copy) {
        sent[copy].narrow(0, begin, end - begin).copy_(own.narrow(0, begin, end - begin));
      }
    };
    const at::Tensor received = newSlots();
    const auto decompress = [&](int64_t begin, int64_t end) {
      const Stage stage(seconds_, "decompress");
      for (int host = 0; host < hosts_; ++host) {
        at::Tensor values = chunk(host);
        const at::Tensor& packed = host == lanes_.ownHost() ? own : received[host];
        minmax_uint8::decompressPiece(packed, pieceOf(begin, end, values), values);
      }
    };
    const Elapsed gather(seconds_, "gather", {"reduce", "decompress"});
    const Pipeline pipeline{.beforeSending = compress, .afterReceiving = decompress};
    at::Tensor receivedBytes = received.view({-1});
    if (isToAll) return communicator_.allGatherInPieces(receivedBytes, own, pipeline);
    communicator_.allToAllInPieces(receivedBytes, sent.view({-1}), map_.splits(slotBytes_), map_.splits(slotBytes_),
                                   pipeline);
  }

 private:
  [[nodiscard]] at::Tensor newSlots() const {
    return at::empty({hosts_, slotBytes_}, values_.options().dtype(at::kByte));
  }

  [[nodiscard]] at::Tensor chunk(int host) const {
    const int64_t begin = std::min(host * chunkLength_, values_.numel());
    return values_.narrow(0, begin, std::min(chunkLength_, values_.numel() - begin));
  }

  [[nodiscard]] static minmax_uint8::Piece pieceOf(int64_t begin, int64_t end, const at::Tensor& values) {
    return minmax_uint8::pieceIn(begin, end, values.numel());
  }

  const at::Tensor values_;
  const HostLanes& lanes_;
  StageSeconds& seconds_;
  Communicator& communicator_;
  const SlotMap map_;
  const int hosts_;
  const int64_t chunkLength_;
  const int64_t slotBytes_;
};

}  // namespace

void exchangeBetweenHosts(at::Tensor& flat, const HostLanes& lanes, float divisor, StageSeconds& seconds,
                          Communicator& communicator) {
  if (PipelinedExchange::isPossible(flat, lanes)) {
    PipelinedExchange exchange(flat, lanes, seconds, communicator);
    return exchange.spread(exchange.reduce(divisor));
  }
  const Exchange exchange(flat, lanes, communicator);
  at::Tensor slots;
  {
    const Stage stage(seconds, "compress");
    slots = exchange.compressLanes();
  }
  {
    const Stage stage(seconds, "exchange");
    slots = exchange.swap(slots);
  }
  at::Tensor reduced;
  {
    const Stage stage(seconds, "reduce");
    reduced = exchange.reduceChunks(slots, divisor);
  }
  {
    const Stage stage(seconds, "gather");
    slots = exchange.spread(reduced);
  }
  const Stage stage(seconds, "decompress");
  exchange.decompressLanes(slots);
}

}  // namespace bagua::bytegrad
