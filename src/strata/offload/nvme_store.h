// StateStore on a drive. Blocks lie in one range of bytes, at multiples of 4 KiB; add_all() takes
// their space. Leases lie in an arena of host memory, where the device's kernels work on them. A
// lease covers a part of a block, so a block may be larger than the arena, and there may be any
// number of blocks. The store writes returned parts to the drive while the caller continues. Once
// one round of fetches has shown the order, the store prefetches the next parts.
//
// Threads: one at a time, that of the arena. Ownership: keeps arena and file; the device outlives
// the store and its leases. Memory: the charged arena, and some bytes a page. Errors:
// as StateStore says. An IoError names the block, the path, offset, wanted and got bytes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "strata/device/device.h"
#include "strata/offload/block_file.h"
#include "strata/offload/staging_arena.h"
#include "strata/offload/state_store.h"

namespace strata::offload {

// Predicts the next fetched part. It learns which part came after the same two parts in a row, or
// at least after the last one. So it knows a loop over all parts in one order from the second round
// on, including the wrap to the first part. If the order changes, the part in question comes late
// once. Threads: one. Memory: some tens of bytes for each position of a round; it learns nothing of
// rounds with more than a million parts. Pure bookkeeping.
class FetchSequence {
 public:
  // `part` is fetched. Returns the parts that were predicted before it, and are not any more.
  std::vector<Part> record(const Part& part) {
    std::vector<Part> dropped;
    const int index = index_of(part);
    if (index < 0) {  // too many: all over again
      for (const int predicted : predicted_) dropped.push_back(at(predicted).part);
      *this = FetchSequence();
      return dropped;
    }
    const auto found = std::ranges::find(predicted_, index);
    for (auto it = predicted_.begin(); it != found; ++it) dropped.push_back(at(*it).part);
    predicted_.erase(predicted_.begin(), found == predicted_.end() ? found : found + 1);
    learn(index);
    return dropped;
  }

  // The part after all predicted ones; nullopt if it is unknown.
  std::optional<Part> following() const {
    const int next = next_of(end());
    if (next < 0) return std::nullopt;
    return parts_[static_cast<std::size_t>(next)].part;
  }
  // The number of fetches between two of the same part, the longest recent one; 0: unknown.
  std::int64_t round() const { return round_; }
  // Adds the part to the predicted ones.
  void predict_following() {
    if (const int next = next_of(end()); next >= 0) predicted_.push_back(next);
  }

 private:
  static constexpr std::size_t kPartsMost = 1 << 20;
  // The part of a round's length that each shorter one takes.
  static constexpr std::int64_t kForgets = 8;

  static std::uint64_t key_of(int before, int last) {
    return (std::uint64_t{static_cast<std::uint32_t>(before)} << 32U) |
           static_cast<std::uint32_t>(last);
  }
  struct Pair {
    int before = -1;
    int last = -1;
  };
  struct Known {
    Part part;
    int next = -1;              // the index of the part after it; -1: unknown
    std::int64_t recorded = 0;  // when it was fetched last
  };
  Known& at(int index) { return parts_[static_cast<std::size_t>(index)]; }
  int index_of(const Part& part) {
    const auto found = indices_.find(part);
    if (found != indices_.end()) return found->second;
    if (parts_.size() == kPartsMost) return -1;
    const int index = static_cast<int>(parts_.size());
    indices_.emplace(part, index);
    parts_.push_back({.part = part});
    return index;
  }
  int next_of(Pair pair) const {
    if (pair.last < 0) return -1;
    const auto found = by_two_.find(key_of(pair.before, pair.last));
    return found != by_two_.end() ? found->second
                                  : parts_[static_cast<std::size_t>(pair.last)].next;
  }
  // The pair after which following() comes.
  Pair end() const {
    if (predicted_.empty()) return current_;
    const int before = predicted_.size() > 1 ? *(predicted_.end() - 2) : current_.last;
    return {before, predicted_.back()};
  }
  void learn(int index) {
    if (current_.last >= 0) {
      at(current_.last).next = index;
      // Random fetches never repeat a pair, so their pairs are worth no memory.
      if (by_two_.size() >= 2 * kPartsMost) by_two_.clear();
      if (current_.before >= 0) by_two_[key_of(current_.before, current_.last)] = index;
    }
    current_ = {current_.last, index};
    std::int64_t& recorded = at(index).recorded;
    ++now_;
    if (recorded > 0) round_ = std::max(now_ - recorded, round_ - round_ / kForgets);
    recorded = now_;
  }

  std::map<Part, int> indices_;
  std::vector<Known> parts_;                       // by index
  std::unordered_map<std::uint64_t, int> by_two_;  // by two in a row
  std::int64_t now_ = 0;
  std::int64_t round_ = 0;
  Pair current_;
  std::deque<int> predicted_;
};

struct NvmeStoreOptions {
  std::shared_ptr<StagingArena> arena;
  std::unique_ptr<BlockFile> file;
  // Keeps a checksum of each page that is written, and compares it when the page is read. This
  // costs 8 bytes of memory for 4 KiB, and the time of one pass over the bytes.
  bool verify = false;
  bool read_ahead = true;
};

std::unique_ptr<StateStore> make_nvme_store(device::Device& device, NvmeStoreOptions options);

}  // namespace strata::offload
