// Finds the blocks of a live model's values that differ from rank 0's on any rank that keeps a part
// of them. The code that reads the values also writes their fingerprints; one exchange then gives
// all ranks the same result. Threads: one; fingerprints of different blocks may be written by
// different threads.
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

  // Whether ranks compare at all: there is more than one.
  bool wanted() const { return collectives_.world_size() > 1; }
  // Whether the others are compared with this rank, which is rank 0. It gives fingerprints of all
  // blocks except those that it alone keeps. Other ranks give those of the blocks of which they
  // keep a part.
  bool is_reference() const { return wanted() && collectives_.rank() == 0; }

  // The place for this rank's fingerprints of `count` blocks of the parameter, from block `first`
  // on.
  std::span<char> place_for(int param, std::size_t first, std::size_t count);
  // Collective; called when all fingerprints have been written.
  void exchange();

  // Whether any block differs; valid after exchange(), and the same on every rank.
  bool any() const { return any_; }
  // The parameter's blocks as runs [begin, end), each of which differs as a whole or not at all,
  // and has at most `most` blocks.
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
