// Predicts the next fetched part. It learns which part came after the same two parts in a row, or
// at least after the last one. So it knows a loop over all parts in one order from the second round
// on, including the wrap to the first part. If the order changes, the part in question comes late
// once. Threads: one. Memory: some tens of bytes for each position of a round; it learns nothing of
// rounds with more than a million parts. Pure bookkeeping.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <unordered_map>
#include <vector>

#include "strata/offload/part.h"

namespace strata::offload {

class FetchSequence {
 public:
  // `part` is fetched. Returns the parts that were predicted before it, and are not any more.
  std::vector<Part> note(const Part& part);

  // The part after all predicted ones; nullopt if it is unknown.
  std::optional<Part> following() const;
  // The number of fetches between two of the same part, the longest recent one; 0: unknown.
  std::int64_t round() const { return round_; }
  // Adds the part to the predicted ones.
  void expect_following();

 private:
  struct Pair {
    int before = -1;
    int last = -1;
  };
  int index_of(const Part& part);
  int next_of(Pair at) const;
  Pair end() const;  // what following() comes after
  void learn(int index);

  std::map<Part, int> indices_;
  std::vector<Part> parts_;                        // by index
  std::unordered_map<std::uint64_t, int> by_two_;  // by two in a row
  std::vector<int> by_one_;                        // by index; -1: not known
  std::vector<std::int64_t> noted_;                // by index: when it was fetched last
  std::int64_t now_ = 0;
  std::int64_t round_ = 0;
  Pair current_;
  std::deque<int> expected_;
};

}  // namespace strata::offload
