// Finds the blocks of a live model's values that differ from rank 0's on any rank that keeps a part
// of them, by fingerprints of the blocks (kernels::Fingerprint), so that no values are sent.
// Threads: one; fingerprints of different blocks may be written by different threads. Ownership:
// borrows all. Errors: CommError.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "strata/base/thread_pool.h"
#include "strata/base/units.h"
#include "strata/comm/collectives.h"
#include "strata/device/device.h"
#include "strata/torch/model/model_plan.h"

namespace strata::torch {

inline constexpr std::size_t kFingerprintBytes = 16;

inline constexpr Bytes kBlock = 1_MiB;

// How many blocks a tensor of `bytes` is cut into.
std::size_t block_count(Bytes bytes);

// Fingerprints of the blocks of tensors' bytes, many tensors at a time.
// The bits do not depend on where a tensor lies. The threads share the work on the host. Borrows
// until flush() the bytes that were added and the targets of their fingerprints.
class Fingerprints {
 public:
  // `device`: of tensors that are not on the host.
  Fingerprints(device::Device& device, ThreadPool& threads) : device_(device), threads_(threads) {}

  // Fingerprints of the blocks of these bytes go to `target`, one after the other.
  void add(std::span<const std::byte> bytes, bool on_host, std::span<char> target);
  // Computes the fingerprints of all added bytes.
  void flush();

 private:
  struct Added {
    std::span<const std::byte> bytes;
    char* target;
  };
  void flush_device();

  device::Device& device_;
  ThreadPool& threads_;
  std::vector<Added> on_device_;
  std::vector<Added> on_host_;  // a block each
};

// The code that reads the values also writes their fingerprints; one exchange then gives all ranks
// the same result.
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
