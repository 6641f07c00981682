// Which part is fetched next: learned from what came after the same two parts in a row, or at least
// after the last one, when they were fetched before. A loop that goes through all parts in one
// order is known from its second round on, its wrapping round included; where the order changes,
// the part in question comes late once. Threads: one. Memory: some tens of bytes for each place of
// a round; of rounds of more than a million parts nothing is learned. Pure bookkeeping.
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
  // `part` is fetched. Returns what was expected before it and is not any more.
  std::vector<Part> note(const Part& part);

  // The part that comes after all that are expected; nothing where that is not known.
  std::optional<Part> following() const;
  // How many fetches lie between two of the same part, the longest of late; 0: not known.
  std::int64_t round() const { return round_; }
  // Expects the part from now on.
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
