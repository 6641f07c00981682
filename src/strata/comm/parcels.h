// The bytes that each rank of a shard group sends to each of them in one exchange, and where they
// lie: a rank's source has its parcels one after the other, in the order of receivers, and its
// target in the order of senders. Pure arithmetic; the same on every rank. Threads: any that read.
#pragma once

#include <xxhash.h>

#include <cstdint>
#include <vector>

#include "strata/base/units.h"

namespace strata::comm {

class Parcels {
 public:
  explicit Parcels(int ranks)
      : ranks_(ranks), bytes_(static_cast<std::size_t>(ranks) * static_cast<std::size_t>(ranks)) {}

  int ranks() const { return ranks_; }
  Bytes at(int from, int to) const { return bytes_[place(from, to)]; }
  void add(int from, int to, Bytes bytes) { bytes_[place(from, to)] += bytes; }

  Bytes sent(int from) const { return in_source(from, ranks_); }
  Bytes received(int to) const { return in_target(ranks_, to); }
  // The offset of a parcel in its sender's source, and in its receiver's target.
  Bytes in_source(int from, int to) const {
    Bytes offset;
    for (int before = 0; before < to; ++before) offset += at(from, before);
    return offset;
  }
  Bytes in_target(int from, int to) const {
    Bytes offset;
    for (int before = 0; before < from; ++before) offset += at(before, to);
    return offset;
  }
  Bytes total() const {
    Bytes sum;
    for (const Bytes bytes : bytes_) sum += bytes;
    return sum;
  }
  // Everything goes back: the same parcels from their receivers to their senders.
  Parcels reversed() const {
    Parcels back(ranks_);
    for (int from = 0; from < ranks_; ++from) {
      for (int to = 0; to < ranks_; ++to) back.add(to, from, at(from, to));
    }
    return back;
  }
  // Differs where parcels do.
  std::uint32_t fingerprint() const {
    return static_cast<std::uint32_t>(XXH3_64bits(bytes_.data(), bytes_.size() * sizeof(Bytes)));
  }

 private:
  std::size_t place(int from, int to) const {
    return static_cast<std::size_t>(from) * static_cast<std::size_t>(ranks_) +
           static_cast<std::size_t>(to);
  }

  int ranks_;
  std::vector<Bytes> bytes_;
};

}  // namespace strata::comm
