// Which blocks of a live model's values are not rank 0's, on any rank that keeps something of them.
// Fingerprints are written by whoever reads the values anyway; one exchange then tells all ranks
// the same. Threads: one; fingerprints of different blocks may be written by different threads.
// Ownership: borrows all. Errors: CommError.
#pragma once

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "strata/comm/collectives.h"
#include "strata/torch/model/model_input.h"
#include "strata/torch/start/fingerprint.h"

namespace strata::torch {

inline constexpr Bytes kBlock = 1_MiB;

class Comparison {
 public:
  Comparison(comm::Collectives& collectives, const std::vector<ModelParameter>& parameters);

  // Whether there is anything to compare: more than one rank.
  bool wanted() const { return collectives_.world_size() > 1; }
  // Whether the others are compared with this rank: rank 0. It gives fingerprints of all blocks but
  // those that it alone keeps; others give those of which they keep something.
  bool is_reference() const { return wanted() && collectives_.rank() == 0; }

  // This rank gives fingerprints of `count` blocks of the parameter, from `first` on: where they
  // go.
  std::span<char> place_for(int param, std::size_t first, std::size_t count);
  // Collective, when all have been written.
  void exchange();

  // After exchange(), the same on every rank: whether some differ.
  bool any() const { return any_; }
  // The parameter's blocks as runs [begin, end) that all differ, or all do not; no longer than
  // `most` blocks.
  struct Run {
    std::size_t begin;
    std::size_t end;
    bool differs;
  };
  std::vector<Run> runs(int param, std::size_t most) const;

 private:
  std::size_t first_block(int param) const { return first_[static_cast<std::size_t>(param)]; }

  comm::Collectives& collectives_;
  std::vector<std::size_t> first_;  // by parameter, among all blocks; and their number
  std::string found_;               // kFingerprintBytes a block
  std::string given_;               // a block: '1' if found_ counts
  std::vector<bool> differs_;
  bool any_ = false;
};

}  // namespace strata::torch
